"""Reads records of a run from its log; the only I/O in this package."""

from collections.abc import AsyncIterator, Iterable, Sequence

from forgemq.bus.log import Log, Place, Record
from forgemq.bus.reading import read_to_end, read_up_to
from forgemq.contracts import topics
from forgemq.contracts.messages import Message
from forgemq.contracts.run import RunConfiguration
from forgemq.contracts.topics import Topic, partition_count


def places_of(topic: Topic, configuration: RunConfiguration) -> list[Place]:
    """Every partition of a topic in this run."""
    count = partition_count(
        topic,
        group_partitions=configuration.log.group_partitions,
        lanes=configuration.log.lanes,
        queues=len(configuration.queues),
    )
    return [Place(topic.name, partition) for partition in range(count)]


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
    async for records in read_to_end(log, await log.first_positions(places)):
        yield records


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
    reader = await log.reader({place: max(first[place], min(offsets[place])) for place in offsets})
    last = {place: min(ends[place], max(offsets[place]) + 1) for place in offsets}
    try:
        async for records in read_up_to(reader, last):
            found += [record for record in records if record.offset in offsets[record.place]]
    finally:
        await reader.close()
    return found
