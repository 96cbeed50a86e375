"""From a struct to a log record: its key, and the group of a record whose key is another id."""

import ast
from pathlib import Path

import pytest

from forgemq_contracts import topics
from forgemq_contracts.examples import full
from forgemq_contracts.messages import Output
from forgemq_shell.records import emit_of

ROOT = Path(__file__).parents[3]
WITH_ANOTHER_KEY = [
    topic
    for topic in topics.OF_RUN
    if "group_id" in topic.record.__struct_fields__ and topic.key != "group_id"
]


@pytest.mark.parametrize("topic", WITH_ANOTHER_KEY, ids=lambda topic: topic.name)
def test_the_group_stands_behind_the_callers_headers_if_it_is_not_the_key(topic: topics.Topic):
    record = full(topic.record)
    emit = emit_of(
        Output(topic=topic.name, partition=3, record=record), headers=(("traceparent", b"1"),)
    )
    assert emit.key == str(getattr(record, topic.key)).encode()
    assert emit.headers == (("traceparent", b"1"), ("group", record.group_id.encode()))


def test_a_record_with_its_group_as_key_carries_no_second_copy():
    topic = topics.RETIRED_GROUPS
    emit = emit_of(Output(topic=topic.name, partition=0, record=full(topic.record)))
    assert (emit.key, emit.headers) == (full(topic.record).group_id.encode(), ())


@pytest.mark.slow
def test_no_service_makes_the_records_it_writes_by_hand():
    """One made without `emit_of` would lack the header `group`."""
    sources = sorted((ROOT / "services").glob("*/src/**/*.py"))
    by_hand = [
        f"{source.relative_to(ROOT)}:{node.lineno}"
        for source in sources
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Emit"
    ]
    assert len(sources) > 100
    assert by_hand == []
