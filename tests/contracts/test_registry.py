"""Every topic of the registry is complete, and services declare the same topics."""

import importlib
import re
from pathlib import Path

import pytest

from forgemq_contracts import topics
from forgemq_contracts.journal import JournalledBatch
from tests.small_run import small_run

SERVICES = sorted({name for topic in topics.ALL for name in (topic.producer, *topic.consumers)})
FOLDERS = Path(__file__).parents[2] / "services"


@pytest.mark.parametrize("topic", topics.ALL, ids=lambda topic: topic.name)
def test_a_topic_is_a_participle_a_plural_noun_and_a_major(topic: topics.Topic):
    assert re.fullmatch(r"[a-z]+(-[a-z]+)+-v[0-9]+", topic.name)
    assert topic.consumers, "nobody reads it"
    assert len(set(topic.consumers)) == len(topic.consumers)
    assert topic.key in topic.record.__struct_fields__


@pytest.mark.parametrize("topic", topics.ALL, ids=lambda topic: topic.name)
def test_no_record_is_positional_on_the_wire(topic: topics.Topic):
    config = topic.record.__struct_config__
    assert not config.array_like
    assert config.frozen


def test_names_are_unique_and_records_follow_their_topics():
    assert len(topics.BY_NAME) == len(topics.ALL)
    for topic in topics.ALL:
        if not topic.name.endswith("-journal-v1"):
            words = topic.name.rsplit("-", 1)[0].split("-")
            singular = {"weights": "Weights"}.get(words[1], words[1].removesuffix("s").title())
            assert topic.record.__name__ == words[0].title() + singular


def test_topics_of_one_group_are_partitioned_alike():
    run = small_run(group_partitions=5, lanes=3, queues=2)
    by_group = {t.name for t in topics.ALL if t.partitioned_by == "group"}
    assert {topics.partition_count(t, run) for t in topics.ALL if t.name in by_group} == {5}
    assert topics.partition_count(topics.REPORTED_ENGINES, run) == 3
    assert topics.partition_count(topics.ADMITTED_GROUPS, run) == 2
    assert topics.partition_count(topics.STARTED_RUNS, run) == 1


# Derived from other records, part of a later one, or a person's, who asks again: nothing in a run
# depends on a bad one, so it is skipped.
WITHOUT_DEAD_LETTERS = {
    topics.AUDITED_GROUPS.name,
    topics.OFFERED_BROADCASTS.name,
    topics.OWNED_RUNS.name,
    topics.REPORTED_GATEWAYS.name,
    topics.REQUESTED_ENDS.name,
    topics.SAMPLED_CHUNKS.name,
}


@pytest.mark.parametrize("topic", topics.OF_RUN, ids=lambda topic: topic.name)
def test_one_reader_of_each_topic_writes_its_dead_letters(topic: topics.Topic):
    """Two readers would write two dead letters for one record; no reader would lose it."""
    is_exempt = topic.record is JournalledBatch or topic.name in WITHOUT_DEAD_LETTERS
    assert topic.has_dlq != is_exempt
    if topic.has_dlq:
        assert topic.dead_letters_by in topic.consumers
        assert topics.BY_DLQ_NAME[topic.dlq_name] is topic


# The shell reads journals and the run's record on behalf of every service.
JOURNALS = {topic.name for topic in topics.ALL if topic.record is JournalledBatch}
BY_THE_SHELL = JOURNALS | {topics.STARTED_RUNS.name}


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_declares_the_topics_that_the_registry_gives_it(service: str):
    assert (FOLDERS / service / "pyproject.toml").exists(), "the registry names no such service"
    app = importlib.import_module(f"forgemq_{service}.app")
    read = {topic.name for topic in topics.ALL if service in topic.consumers}
    written = {topic.name for topic in topics.ALL if topic.producer == service}
    assert {topic.name for topic in app.CONSUMES} - BY_THE_SHELL == read - BY_THE_SHELL
    assert {topic.name for topic in app.PRODUCES} == written - JOURNALS
