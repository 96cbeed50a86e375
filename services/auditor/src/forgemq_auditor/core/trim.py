"""Up to where each partition may be trimmed."""

from collections.abc import Mapping
from typing import TypeVar

from forgemq_contracts.topics import Topic

Partition = TypeVar("Partition")


def trim_positions(
    topics: Mapping[Partition, Topic],
    *,
    needed: Mapping[str, Mapping[Partition, int]],
    first: Mapping[Partition, int],
    ends: Mapping[Partition, int],
) -> dict[Partition, int]:
    """Where each partition may begin; without the partitions that do not change.

    Args:
        topics: Partitions of trimmed topics, and their topics.
        needed: For each group, from where its readers may read again. If a partition is missing,
            that group may still read all of it.
        first: Offsets of the oldest records kept.
        ends: Ends of the partitions whose topics keep their newest records.
    """
    before: dict[Partition, int] = {}
    for partition, topic in topics.items():
        limits = [needed[group].get(partition, first[partition]) for group in topic.needed_by]
        if topic.newest_kept:
            limits.append(ends[partition] - topic.newest_kept)
        if min(limits) > first[partition]:
            before[partition] = min(limits)
    return before
