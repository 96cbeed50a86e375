"""Reading what a log still holds, while its oldest records may be deleted at any moment."""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence

import msgspec

from forgemq_bus.bounded_reads import read_up_to
from forgemq_bus.decoding import decoded_record
from forgemq_bus.errors import OutOfRangeError
from forgemq_bus.log import Isolation, Log, Place, Reader, Record
from forgemq_contracts.messages import Message


def message_of(record: Record) -> Message:
    """The decoded message.

    Raises:
        msgspec.ValidationError: the bytes are not a record of the topic, or are lost.
    """
    return Message(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        timestamp_ms=record.timestamp_ms,
        record=decoded_record(record),
    )


def messages_of(records: Iterable[Record]) -> Iterator[Message]:
    """The messages of those that decode, for a reader whose place it is not to refuse the others.

    A topic that all runs share may hold records of a later release, which has other fields.
    """
    for record in records:
        try:
            yield message_of(record)
        except msgspec.ValidationError:
            continue


async def read_all(log: Log, places: Sequence[Place]) -> AsyncIterator[list[Record]]:
    """Every record that these partitions hold at the time of the call, in batches.

    Raises:
        LogUnavailableError: the log does not give all it has.
    """
    async for records in read_from(log, await log.first_positions(places)):
        yield records


async def read_from(
    log: Log,
    starts: Mapping[Place, int],
    *,
    ends: Mapping[Place, int] | None = None,
    isolation: Isolation = "committed",
    has_values: bool = True,
) -> AsyncIterator[list[Record]]:
    """Batches from these positions up to `ends`.

    Records that are trimmed meanwhile are left out, and so are those whose blob is lost: both are
    not on the log any more.

    Args:
        log: Of the run.
        starts: Where to begin in each partition.
        ends: Where to stop; without it the ends at the time of the call.
        isolation: As in `Log.reader`.
        has_values: As in `Log.reader`.

    Raises:
        LogUnavailableError: the log does not give all it has.
    """
    if ends is None:
        ends = await log.end_positions(list(starts), isolation=isolation)
    reader = await log.reader(starts, isolation=isolation, has_values=has_values)
    is_done = False
    try:
        while not is_done:
            try:
                async for records in read_up_to(reader, ends):
                    yield [record for record in records if not record.lost]
                is_done = True
            except OutOfRangeError:
                await pass_trimmed(log, reader, list(starts))
    finally:
        await reader.close()


async def pass_trimmed(log: Log, reader: Reader, places: Sequence[Place]) -> None:
    """Move a reader that trimming overtook to the first records that are kept.

    Raises:
        OutOfRangeError: trimming did not overtake it, so its positions never were on the log.
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
    stops = {place: min(ends[place], max(offsets[place]) + 1) for place in offsets}
    async for records in read_from(log, starts, ends=stops):
        found += [record for record in records if record.offset in offsets[record.place]]
    return found
