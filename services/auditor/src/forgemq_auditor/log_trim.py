"""Trims the topics of a run below what every reader of them may still read again.

Every reader of a trimmed topic commits, to the group that the registry names in `needed_by`, from
where its restart reads. Records below the lowest of these positions are deleted, partition by
partition; if a position is missing, none are. No other code deletes records. A reader never needs
what lies below its position, so two processes that trim at once, or one that dies, do no harm.
"""

from forgemq_auditor.core import trim_positions
from forgemq_bus.log import Log
from forgemq_bus.partitions import partitions_of
from forgemq_contracts import topics
from forgemq_contracts.run import RunConfiguration


async def trim_log(log: Log, configuration: RunConfiguration) -> dict[str, int]:
    """Delete what nobody needs any more; returns the number of offsets freed by topic.

    Raises:
        LogError: the log does not answer or refuses; some partitions may be trimmed already.
    """
    topic_of = {
        place: topic
        for topic in topics.OF_RUN
        if topic.needed_by
        for place in partitions_of(topic, configuration)
    }
    # Positions first: trimmed records and ends only grow while the rest is asked for.
    groups = sorted({group for topic in topic_of.values() for group in topic.needed_by})
    needed = {
        group: await log.committed(
            group=group,
            places=[place for place, topic in topic_of.items() if group in topic.needed_by],
        )
        for group in groups
    }
    kept = [place for place, topic in topic_of.items() if topic.newest_kept]
    ends = await log.end_positions(kept)
    first = await log.first_positions(list(topic_of))
    before = trim_positions(topic_of, needed=needed, first=first, ends=ends)
    await log.trim(before)
    freed: dict[str, int] = {}
    for place, position in before.items():
        freed[place.topic] = freed.get(place.topic, 0) + position - first[place]
    return freed
