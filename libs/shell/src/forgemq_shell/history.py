"""What a task did before: its journal, and the inputs the journal names, read again."""

import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

import msgspec

from forgemq_bus.log import Log, Place, Reader, Record
from forgemq_bus.reading import read_up_to
from forgemq_contracts.journal import JournalInput, JournalledBatch

_DECODER = msgspec.msgpack.Decoder(JournalledBatch)
_READ_S = 0.5
_RECORDS_MAX = 200
_STALLED_S = 60.0


class HistoryError(Exception):
    """The journal or an input it names is incomplete; the task's state cannot be rebuilt."""


async def journal(log: Log, place: Place, *, start: int, end: int) -> list[JournalledBatch]:
    """Batches in [start, end) of one partition of a journal; raises as `journalled`."""
    return [batch async for _, batch in journalled(log, place, start=start, end=end)]


async def journalled(
    log: Log, place: Place, *, start: int, end: int
) -> AsyncGenerator[tuple[int, JournalledBatch], None]:
    """Offset and batch of everything in [start, end) of one partition of a journal.

    Raises:
        HistoryError: a batch is missing.
        LogUnavailableError: the log does not give all it has.
    """
    before: JournalledBatch | None = None
    reader = await log.reader({place: start})
    try:
        async for records in read_up_to(reader, {place: end}):
            for record in records:
                if record.offset < end:
                    before = _following(before, record)
                    yield record.offset, before
    finally:
        await reader.close()


def _following(before: JournalledBatch | None, record: Record) -> JournalledBatch:
    batch = _DECODER.decode(record.value)
    if before is not None and batch.sequence != before.sequence + 1:
        raise HistoryError(
            f"{record.topic}/{record.partition}: batch {batch.sequence} at {record.offset} "
            f"follows batch {before.sequence}"
        )
    return batch


def since_newest_snapshot(batches: Sequence[JournalledBatch]) -> list[JournalledBatch]:
    """The last batches that rebuild the state: from the newest snapshot, or from the first."""
    snapshots = [index for index, batch in enumerate(batches) if batch.snapshot is not None]
    return list(batches[snapshots[-1] :] if snapshots else batches)


def input_starts(batches: Sequence[JournalledBatch]) -> dict[Place, int]:
    """Offset of the first record of each partition that these batches read."""
    starts: dict[Place, int] = {}
    for item in (item for batch in batches for item in batch.inputs if item.topic):
        starts.setdefault(Place(item.topic, item.partition), item.offset)
    return starts


def check_kept(starts: Mapping[Place, int], kept: Mapping[Place, int]) -> None:
    """Refuse starts before the oldest records that are kept.

    Raises:
        HistoryError: an input was trimmed away; says which.
    """
    for place, start in starts.items():
        if start < kept[place]:
            raise HistoryError(
                f"{place.topic}/{place.partition}: record {start} is needed but the oldest "
                f"one kept is {kept[place]}"
            )


class InputHistory:
    """Reads ranges of input records again, in the order the journal names them.

    Holds at most what one range and one read ahead of it need: all other partitions are paused.
    """

    def __init__(self, log: Log, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock_s = clock_s
        self._reader: Reader | None = None
        self._ahead: dict[Place, deque[Record]] = {}

    async def open(self, batches: Sequence[JournalledBatch]) -> None:
        """Get ready to read the inputs of these batches, from the first of each partition.

        Raises:
            HistoryError: an input was trimmed away.
        """
        starts = input_starts(batches)
        if not starts:
            return
        check_kept(starts, await self._log.first_positions(list(starts)))
        self._ahead = {place: deque() for place in starts}
        self._reader = await self._log.reader(starts)
        self._reader.pause(list(starts))

    async def records(self, item: JournalInput) -> list[Record]:
        """All records of one range.

        Raises:
            HistoryError: the log does not return the range's last record.
        """
        if self._reader is None:
            raise HistoryError(f"{item.topic}/{item.partition}@{item.offset}: not opened for it")
        place, end = Place(item.topic, item.partition), item.offset + item.count
        ahead, found = self._ahead[place], list[Record]()
        deadline_s = self._clock_s() + _STALLED_S
        self._reader.resume([place])
        while not found or found[-1].offset < end - 1:
            while ahead and ahead[0].offset < end:
                found.append(ahead.popleft())
            if found and found[-1].offset == end - 1:
                break
            if ahead or self._clock_s() > deadline_s:
                raise HistoryError(f"{place.topic}/{place.partition}: record {end - 1} is missing")
            ahead.extend(await self._reader.read(timeout_s=_READ_S, records_max=_RECORDS_MAX))
        self._reader.pause([place])
        return found

    async def close(self) -> None:
        """Release the connection; idempotent."""
        if self._reader is not None:
            await self._reader.close()
