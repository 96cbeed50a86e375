"""Reads records of a run from its log; the only I/O in this package."""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

from forgemq_bus.bounded_reads import read_up_to
from forgemq_bus.errors import OutOfRangeError
from forgemq_bus.log import Log, Place, Reader, Record
from forgemq_contracts import topics
from forgemq_contracts.messages import Message


def message_of(record: Record) -> Message:
    """The decoded message; raises msgspec.ValidationError where it is none of its topic."""
    return Message(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        timestamp_ms=record.timestamp_ms,
        record=topics.decode(topics.BY_NAME[record.topic], record.value),
    )


async def read_all(log: Log, places: Sequence[Place]) -> AsyncIterator[list[Record]]:
    """Every record of these partitions that is on the log now, in batches.

    Raises:
        LogUnavailableError: the log does not give all it has.
    """
    async for records in read_from(log, await log.first_positions(places)):
        yield records


async def read_from(
    log: Log, starts: Mapping[Place, int], *, ends: Mapping[Place, int] | None = None
) -> AsyncIterator[list[Record]]:
    """Batches from these positions up to the ends of now; what is trimmed meanwhile is left out.

    Raises:
        LogUnavailableError: the log does not give all it has.
    """
    ends = await log.end_positions(list(starts)) if ends is None else ends
    reader = await log.reader(starts)
    is_done = False
    try:
        while not is_done:
            try:
                async for records in read_up_to(reader, ends):
                    yield records
                is_done = True
            except OutOfRangeError:
                await pass_trimmed(log, reader, list(starts))
    finally:
        await reader.close()


async def pass_trimmed(log: Log, reader: Reader, places: Sequence[Place]) -> None:
    """Move a reader that was overtaken by trimming to the first records that are kept.

    Raises:
        OutOfRangeError: it was not overtaken, so its positions never were on the log.
    """
    first = await log.first_positions(places)
    overtaken = [place for place in places if reader.position(place) < first[place]]
    if not overtaken:
        raise OutOfRangeError(f"none of {len(places)} partitions has been trimmed past its reader")
    for place in overtaken:
        reader.seek(place, first[place])


async def read_at(log: Log, wanted: Iterable[tuple[Place, int]]) -> list[Record]:
    """The records at these (partition, offset), as far as the log still has them.

    Raises:
        LogUnavailableError: the log does not give all it has.
    """
    offsets: dict[Place, set[int]] = {}
    for place, offset in wanted:
        offsets.setdefault(place, set()).add(offset)
    if not offsets:
        return []
    first = await log.first_positions(list(offsets))
    ends = await log.end_positions(list(offsets))
    found: list[Record] = []
    starts = {place: max(first[place], min(offsets[place])) for place in offsets}
    last = {place: min(ends[place], max(offsets[place]) + 1) for place in offsets}
    async for records in read_from(log, starts, ends=last):
        found += [record for record in records if record.offset in offsets[record.place]]
    return found
