"""How many partitions topics have, against how many their run counts on.

Every writer names the partition by a number that follows from the run's configuration, so added
partitions stay empty. But the members of a consumer group are given them too.
"""

from collections.abc import Collection, Mapping

from forgemq_bus.errors import PartitionCountError


def check_counts(
    found: Mapping[str, int], wanted: Mapping[str, int], *, may_grow: Collection[str] = ()
) -> dict[str, int]:
    """The topics that have fewer partitions than wanted, and how many they are to have.

    Args:
        found: Topics that exist.
        wanted: Partitions that each is to have, if it exists.
        may_grow: Topics that may have fewer.

    Raises:
        PartitionCountError: a topic has too many, or too few and may not grow.
    """
    other = {topic: count for topic, count in wanted.items() if found.get(topic, count) != count}
    for topic, count in other.items():
        if found[topic] > count or topic not in may_grow:
            raise PartitionCountError(
                f"topic {topic} has {found[topic]} partitions, and its run counts on {count}: a "
                "run can neither use nor lose partitions that somebody adds; start a new run"
            )
    return other
