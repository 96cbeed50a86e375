"""Reads a task's journal, and the input records that the journal names."""

import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

import msgspec

from forgemq_bus.bounded_reads import STALLED_S, read_up_to
from forgemq_bus.log import LogReads, Place, Reader, Record
from forgemq_contracts.journal import JournalInput, JournalledBatch

_DECODER = msgspec.msgpack.Decoder(JournalledBatch)

_READ_S = 0.5
"""One wait for records; only the stall limit bounds the whole read."""

_RECORDS_MAX = 200
"""Records of one read: what is read ahead of one range stays small beside a batch."""


class JournalError(Exception):
    """The journal or an input it names is incomplete; the task's state cannot be rebuilt."""


async def read_journal(
    log: LogReads, place: Place, *, start: int, end: int
) -> list[JournalledBatch]:
    """Batches in [start, end) of one partition of a journal; raises as `read_batches`."""
    return [batch async for _, batch in read_batches(log, place, start=start, end=end)]


async def read_batches(
    log: LogReads, place: Place, *, start: int, end: int
) -> AsyncGenerator[tuple[int, JournalledBatch], None]:
    """Offset and batch of every journal record in [start, end) of one partition.

    Raises:
        JournalError: a batch is missing.
        LogUnavailableError: the log does not give all it has.
    """
    previous: JournalledBatch | None = None
    reader = await log.reader({place: start})
    try:
        async for records in read_up_to(reader, {place: end}):
            for record in records:
                if record.offset < end:
                    previous = _following(previous, record)
                    yield record.offset, previous
    finally:
        await reader.close()


def _following(previous: JournalledBatch | None, record: Record) -> JournalledBatch:
    batch = _DECODER.decode(record.value)
    if previous is not None and batch.sequence != previous.sequence + 1:
        raise JournalError(
            f"{record.topic}/{record.partition}: batch {batch.sequence} at {record.offset} "
            f"follows batch {previous.sequence}"
        )
    return batch


def since_newest_snapshot(batches: Sequence[JournalledBatch]) -> list[JournalledBatch]:
    """The batches that rebuild the state: from the newest snapshot on, or all without one."""
    snapshots = [index for index, batch in enumerate(batches) if batch.snapshot is not None]
    return list(batches[snapshots[-1] :] if snapshots else batches)


def input_starts(batches: Sequence[JournalledBatch]) -> dict[Place, int]:
    """Offset of the first record that these batches read, by partition."""
    starts: dict[Place, int] = {}
    for item in (item for batch in batches for item in batch.inputs if item.topic):
        starts.setdefault(Place(item.topic, item.partition), item.offset)
    return starts


def check_kept(starts: Mapping[Place, int], kept: Mapping[Place, int]) -> None:
    """Refuse starts before the oldest records that are kept.

    Raises:
        JournalError: an input was trimmed away; says which.
    """
    for place, start in starts.items():
        if start < kept[place]:
            raise JournalError(
                f"{place.topic}/{place.partition}: record {start} is needed but the oldest "
                f"one kept is {kept[place]}"
            )


class JournalledInputs:
    """Reads ranges of input records again, in the order the journal names them.

    Memory: one range and one read ahead of it, because all other partitions are paused.
    """

    def __init__(self, log: LogReads, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock_s = clock_s
        self._reader: Reader | None = None
        self._ahead: dict[Place, deque[Record]] = {}

    async def open(self, batches: Sequence[JournalledBatch]) -> None:
        """Open a reader at the first input of these batches in each partition.

        Raises:
            JournalError: an input was trimmed away.
        """
        starts = input_starts(batches)
        if not starts:
            return
        check_kept(starts, await self._log.first_positions(list(starts)))
        self._ahead = {place: deque() for place in starts}
        self._reader = await self._log.reader(starts)
        self._reader.pause(list(starts))

    async def read(self, item: JournalInput) -> list[Record]:
        """Read all records of one range.

        Raises:
            JournalError: the log does not return the range's last record.
        """
        if self._reader is None:
            raise JournalError(f"{item.topic}/{item.partition}@{item.offset}: not opened for it")
        place, end = Place(item.topic, item.partition), item.offset + item.count
        ahead, found = self._ahead[place], list[Record]()
        deadline_s = self._clock_s() + STALLED_S
        self._reader.resume([place])
        while not found or found[-1].offset < end - 1:
            while ahead and ahead[0].offset < end:
                found.append(ahead.popleft())
            if found and found[-1].offset == end - 1:
                break
            # A record behind the range proves that its last one is gone: waiting cannot help.
            if ahead or self._clock_s() > deadline_s:
                raise JournalError(f"{place.topic}/{place.partition}: record {end - 1} is missing")
            ahead.extend(await self._reader.read(timeout_s=_READ_S, records_max=_RECORDS_MAX))
        self._reader.pause([place])
        return found

    async def close(self) -> None:
        """Release the connection; idempotent."""
        if self._reader is not None:
            await self._reader.close()
