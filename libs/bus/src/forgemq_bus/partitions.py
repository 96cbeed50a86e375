"""Which partitions the topics of a run have."""

from forgemq_bus.log import Place
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.topics import Topic, partition_count


def partitions_of(
    topic: Topic, configuration: RunConfiguration, *, is_dead: bool = False
) -> list[Place]:
    """Every partition of a topic in this run, or of its dead-letter topic if `is_dead`."""
    count = partition_count(topic, configuration)
    name = topic.dlq_name if is_dead else topic.name
    return [Place(name, number) for number in range(count)]
