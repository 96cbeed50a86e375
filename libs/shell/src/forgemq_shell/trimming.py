"""Trims the topics of a run below what every reader of them may still read again.

Every reader of a trimmed topic commits, to the group that the registry names in `needed_by`, from
where its restart reads. This is the only place that deletes: below the lowest of those positions,
partition by partition, and nothing where one of them is missing. Positions only ever understate
what is free, so any number of processes may do this at once, and one that dies leaves no harm.
"""

import asyncio
from collections.abc import Mapping
from typing import Protocol

from forgemq_bus.errors import LogError
from forgemq_bus.log import Log, Place
from forgemq_bus.partitions import partitions_of
from forgemq_contracts import topics
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.topics import Topic
from forgemq_telemetry.telemetry import Telemetry

Positions = Mapping[Place, int]


class TrimContext(Protocol):
    """The part of `service.Context` that trimming needs."""

    @property
    def configuration(self) -> RunConfiguration:
        """Of the run."""
        ...

    @property
    def log(self) -> Log:
        """Of the run."""
        ...

    @property
    def telemetry(self) -> Telemetry:
        """Of the service."""
        ...

    @property
    def stop(self) -> asyncio.Event:
        """Set when the service is to end."""
        ...


async def keep_trimmed(context: TrimContext, *, every_s: float) -> None:
    """Trim again and again until `context.stop`; nothing of a run that is kept for replay."""
    if context.configuration.log.keep_for_replay:
        return
    while not context.stop.is_set():
        try:
            for topic, records in (await trim(context.log, context.configuration)).items():
                context.telemetry.count("log.trimmed_records", records, topic=topic)
        except LogError as error:
            # What stays costs space only; the next round tries again.
            context.telemetry.event("not_trimmed", error=str(error))
        try:
            async with asyncio.timeout(every_s):
                await context.stop.wait()
        except TimeoutError:
            continue


async def trim(log: Log, configuration: RunConfiguration) -> dict[str, int]:
    """Delete what nobody needs any more; returns the number of offsets freed by topic.

    Raises:
        LogError: the log does not answer or refuses; some partitions may be trimmed already.
    """
    places = {
        place: topic
        for topic in topics.OF_RUN
        if topic.needed_by
        for place in partitions_of(topic, configuration)
    }
    ends = await log.end_positions([place for place, topic in places.items() if topic.newest_kept])
    groups = sorted({group for topic in places.values() for group in topic.needed_by})
    needed = {
        group: await log.committed(
            group=group,
            places=[place for place, topic in places.items() if group in topic.needed_by],
        )
        for group in groups
    }
    first = await log.first_positions(list(places))
    before = trim_positions(places, needed=needed, first=first, ends=ends)
    await log.trim(before)
    freed: dict[str, int] = {}
    for place, position in before.items():
        freed[place.topic] = freed.get(place.topic, 0) + position - first[place]
    return freed


def trim_positions(
    places: Mapping[Place, Topic],
    *,
    needed: Mapping[str, Positions],
    first: Positions,
    ends: Positions,
) -> dict[Place, int]:
    """Where each partition may begin; partitions that stay as they are are absent.

    Args:
        places: Partitions of trimmed topics, and their topics.
        needed: By group, from where its readers may read again; a missing place is all of it.
        first: Offsets of the oldest records kept.
        ends: Of the places whose topics keep their newest records.
    """
    before: dict[Place, int] = {}
    for place, topic in places.items():
        limits = [needed[group].get(place, first[place]) for group in topic.needed_by]
        if topic.newest_kept:
            limits.append(ends[place] - topic.newest_kept)
        if min(limits) > first[place]:
            before[place] = min(limits)
    return before
