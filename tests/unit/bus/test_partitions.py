"""How many partitions a run costs."""

from forgemq_bus.partitions import dead_letters_of, partition_counts, partitions_of
from forgemq_contracts import topics
from tests.small_run import small_run


def test_every_topic_of_a_run_has_its_partitions_and_its_dead_letters_have_one():
    run = small_run(group_partitions=64)
    counts = partition_counts(run)
    living = [place for topic in topics.ALL for place in partitions_of(topic, run)]
    dead = [dead_letters_of(topic) for topic in topics.ALL if topic.has_dlq]
    assert sum(counts.values()) == len({*living, *dead})
    assert {counts[place.topic] for place in dead} == {1}
    assert counts[topics.FINISHED_COMPLETIONS.name] == 64
