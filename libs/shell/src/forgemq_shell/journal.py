"""Reads a task's journal, and the input records that the journal names."""

import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from forgemq_bus.bounded_reads import STALLED_S, read_up_to
from forgemq_bus.errors import LogUnavailableError, LostBlobError
from forgemq_bus.log import Headers, LogReads, Place, Reader, Record
from forgemq_bus.payloads import reference_of
from forgemq_contracts.journal import JournalInput, JournalledBatch

SNAPSHOT_HEADER = "snapshot"
"""Header of a journal record that holds a snapshot and no input: the number of its batch.

A snapshot lies in the blob store if it is large. If it is lost there, the header says that nothing
else is.
"""

_DECODER = msgspec.msgpack.Decoder(JournalledBatch)

_READ_S = 0.5
"""One wait for records; only the stall limit bounds the whole read."""

_RECORDS_MAX = 200
"""Records of one read: what is read ahead of one range stays small beside a batch."""


class JournalError(Exception):
    """The journal or an input it names is incomplete; the task's state cannot be rebuilt."""


class OtherLogicError(JournalError):
    """The journal's newest batch is another logic version's, so its outputs cannot be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """One record of a journal.

    Attributes:
        position: Its offset.
        sequence: Number of its batch.
        batch: None: a snapshot alone, which lies in the blob store.
    """

    position: int
    sequence: int
    batch: JournalledBatch | None


def snapshot_headers(sequence: int) -> Headers:
    """Headers of the journal record of a snapshot."""
    return ((SNAPSHOT_HEADER, str(sequence).encode()),)


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
    previous: int | None = None
    reader = await log.reader({place: start})
    try:
        async for records in read_up_to(reader, {place: end}):
            for record in records:
                if record.offset < end:
                    batch = _batch(record)
                    previous = _following(previous, batch.sequence, record)
                    yield record.offset, batch
    finally:
        await reader.close()


async def read_entries(
    log: LogReads, place: Place, *, start: int, end: int
) -> Sequence[JournalEntry]:
    """Every journal record in [start, end) of one partition; fetches no snapshot's blob.

    Raises:
        JournalError: a batch is missing, or the blob with its inputs is lost.
        LogUnavailableError: the log does not give all it has.
    """
    entries: list[JournalEntry] = []
    reader = await log.reader({place: start}, has_values=False)
    try:
        async for records in read_up_to(reader, {place: end}):
            for record in (record for record in records if record.offset < end):
                entry = await _entry(log, record)
                _following(entries[-1].sequence if entries else None, entry.sequence, record)
                entries.append(entry)
    finally:
        await reader.close()
    return entries


async def _entry(log: LogReads, record: Record) -> JournalEntry:
    batch: JournalledBatch | None = None
    if reference_of(record) is None:
        batch = _batch(record)
    elif (number := dict(record.headers).get(SNAPSHOT_HEADER)) is not None:
        return JournalEntry(position=record.offset, sequence=int(number), batch=None)
    else:
        try:
            batch = await read_batch(log, record.place, record.offset)
        except LostBlobError as error:
            raise JournalError(f"inputs of a batch are lost: {error}") from error
    return JournalEntry(position=record.offset, sequence=batch.sequence, batch=batch)


async def read_batch(log: LogReads, place: Place, position: int) -> JournalledBatch:
    """The first batch of a journal's partition at or behind this position, with its value.

    Raises:
        LostBlobError: its blob is missing or damaged.
        LogUnavailableError: the log does not give it.
    """
    deadline_s = time.monotonic() + STALLED_S
    reader = await log.reader({place: position})
    try:
        while time.monotonic() < deadline_s:
            for record in await reader.read(timeout_s=_READ_S, records_max=1):
                return _batch(record)
    finally:
        await reader.close()
    raise LogUnavailableError(f"{place}: nothing came at {position}")


def _batch(record: Record) -> JournalledBatch:
    if record.lost:
        raise LostBlobError(f"{record.where}: {record.lost}")
    return _DECODER.decode(record.value)


def _following(previous: int | None, sequence: int, record: Record) -> int:
    if previous is not None and sequence != previous + 1:
        raise JournalError(
            f"{record.place}: batch {sequence} at {record.offset} follows batch {previous}"
        )
    return sequence


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
                f"{place}: record {start} is needed but the oldest one kept is {kept[place]}"
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
            JournalError: the log does not return the range's last record, or nothing for a minute.
        """
        place, end = Place(item.topic, item.partition), item.offset + item.count
        if self._reader is None:
            raise JournalError(f"{place}@{item.offset}: not opened for it")
        ahead, found = self._ahead[place], list[Record]()
        deadline_s = self._clock_s() + STALLED_S
        self._reader.resume([place])
        while not found or found[-1].offset < end - 1:
            if ahead and ahead[0].offset < end:
                found.append(ahead.popleft())
                continue
            # A record behind the range proves that its last one is gone: waiting cannot help.
            if ahead or self._clock_s() > deadline_s:
                raise JournalError(f"{place}: record {end - 1} is missing")
            records = await self._reader.read(timeout_s=_READ_S, records_max=_RECORDS_MAX)
            if records:
                deadline_s = self._clock_s() + STALLED_S
            ahead.extend(records)
        self._reader.pause([place])
        return found

    async def close(self) -> None:
        """Release the connection; idempotent."""
        if self._reader is not None:
            await self._reader.close()
