"""Reads records of a run from its log; the only I/O in this package."""

from collections.abc import AsyncIterator, Iterable, Sequence

from forgemq.bus.log import Log, Place, Reader, Record
from forgemq.contracts import topics
from forgemq.contracts.messages import Message
from forgemq.contracts.run import RunConfiguration
from forgemq.contracts.topics import Topic, partition_count

READ_S = 0.25
RECORDS_MAX = 2000
SILENCE_MAX = 40
"""Empty reads before what is asked for counts as unreadable (trimmed, or a broker away)."""


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
    """Every record of these partitions that is on the log now, in batches."""
    reader = await log.reader(await log.first_positions(places))
    try:
        async for records in until_end(log, reader, places):
            yield records
    finally:
        await reader.close()


async def until_end(
    log: Log, reader: Reader, places: Sequence[Place]
) -> AsyncIterator[list[Record]]:
    """Batches of a reader until it reaches the ends of now."""
    ends = await log.end_positions(places)
    silence = 0
    while silence < SILENCE_MAX and any(reader.position(place) < ends[place] for place in places):
        records = await reader.read(timeout_s=READ_S, records_max=RECORDS_MAX)
        silence = 0 if records else silence + 1
        yield records


async def read_at(log: Log, wanted: Iterable[tuple[Place, int]]) -> list[Record]:
    """The records at these (partition, offset), as far as the log still has them."""
    offsets: dict[Place, set[int]] = {}
    for place, offset in wanted:
        offsets.setdefault(place, set()).add(offset)
    if not offsets:
        return []
    first = await log.first_positions(list(offsets))
    found: list[Record] = []
    reader = await log.reader({place: max(first[place], min(offsets[place])) for place in offsets})
    try:
        silence = 0
        while silence < SILENCE_MAX and any(
            reader.position(place) <= max(offsets[place]) for place in offsets
        ):
            records = await reader.read(timeout_s=READ_S, records_max=RECORDS_MAX)
            silence = 0 if records else silence + 1
            found += [record for record in records if record.offset in offsets[record.place]]
    finally:
        await reader.close()
    return found
