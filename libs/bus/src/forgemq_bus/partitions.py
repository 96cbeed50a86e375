"""Which partitions the topics of a run have."""

from forgemq_bus.log import Place
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.topics import ALL, Topic, partition_count


def dead_letters_of(topic: Topic) -> Place:
    """The one partition with all dead letters about a topic: they are few."""
    return Place(topic.dlq_name, 0)


def partition_counts(configuration: RunConfiguration) -> dict[str, int]:
    """Number of partitions of every topic of a run and of every dead-letter topic, by name."""
    counts = {topic.name: partition_count(topic, configuration) for topic in ALL}
    return counts | {topic.dlq_name: 1 for topic in ALL if topic.has_dlq}


def partitions_of(topic: Topic, configuration: RunConfiguration) -> list[Place]:
    """Every partition of a topic in this run."""
    return [Place(topic.name, number) for number in range(partition_count(topic, configuration))]
