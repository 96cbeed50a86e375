"""Which partitions the topics of a run have."""

from forgemq_bus.log import Place
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.topics import Topic, partition_count


def partitions_of(topic: Topic, configuration: RunConfiguration) -> list[Place]:
    """Every partition of a topic in a run of this configuration, in order."""
    count = partition_count(
        topic,
        group_partitions=configuration.log.group_partitions,
        lanes=configuration.log.lanes,
        queues=len(configuration.queues),
    )
    return [Place(topic.name, number) for number in range(count)]
