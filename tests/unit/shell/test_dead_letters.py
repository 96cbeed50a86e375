"""Dead letters: which group they name, and that an edge writes one for each bad record."""

import asyncio
import io
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from forgemq_bus.log import Emit, Headers, Place, Record
from forgemq_bus.memory import MemoryLog
from forgemq_bus.partitions import dead_letters_of
from forgemq_contracts import topics
from forgemq_contracts.examples import full
from forgemq_contracts.messages import Output
from forgemq_shell.dead_letters import DeadLetters, dead_letter, group_of, letter_of
from forgemq_shell.records import emit_of
from forgemq_telemetry.exporters import exporter_of
from forgemq_telemetry.settings import TelemetrySettings
from forgemq_telemetry.telemetry import Telemetry
from tests.scraped import samples

GROUP = "g-0123456789abcdef"
OPENED = topics.OPENED_EPISODES
QUIET = Telemetry(service="gateway", stream=io.StringIO())


def torn(
    topic: topics.Topic,
    *,
    key: bytes = b"",
    value: bytes = b"\xc1",
    headers: Headers = (),
    offset: int = 7,
) -> Record:
    return Record(
        topic=topic.name,
        partition=1,
        offset=offset,
        timestamp_ms=0,
        key=key,
        value=value,
        headers=headers,
    )


def read_back(emit: Emit, *, offset: int = 0) -> Record:
    return Record(
        topic=emit.topic,
        partition=emit.partition,
        offset=offset,
        timestamp_ms=0,
        key=emit.key,
        value=emit.value,
        headers=emit.headers,
    )


ABOUT_GROUPS = [t for t in topics.OF_RUN if t.has_dlq and "group_id" in t.record.__struct_fields__]


@pytest.mark.parametrize("topic", ABOUT_GROUPS, ids=lambda topic: topic.name)
def test_whatever_is_torn_of_a_record_about_a_group_names_its_group(topic: topics.Topic):
    """The record as its service writes it, but with a torn value."""
    emit = emit_of(Output(topic=topic.name, partition=1, record=full(topic.record)))
    bad = torn(topic, key=emit.key, headers=emit.headers)
    assert group_of(bad) == GROUP
    letter = letter_of(read_back(dead_letter(bad, "why")))
    assert (letter.topic, letter.partition, letter.offset) == (topic.name, 1, 7)
    assert (letter.reason, letter.group) == ("why", GROUP)


def test_every_record_that_names_a_group_has_a_topic_whose_records_tell_it():
    """Otherwise bad records of a new topic could not fail their groups."""
    assert {topic.name for topic in ABOUT_GROUPS} == {
        topic.name
        for topic in topics.OF_RUN
        if topic.has_dlq and topic.partitioned_by in ("group", "queue", "lane")
    } - {topics.LOADED_WEIGHTS.name, topics.REPORTED_ENGINES.name}


def test_the_bytes_name_the_group_if_neither_header_nor_key_does():
    value = msgspec.msgpack.encode({"group_id": "g-5", "request_id": 9})
    assert group_of(torn(topics.FINISHED_COMPLETIONS, key=b"f" * 32, value=value)) == "g-5"


def test_a_request_id_is_no_group():
    """32 hexadecimal digits would pass as the id of a group."""
    assert group_of(torn(topics.FINISHED_COMPLETIONS, key=b"f" * 32)) == ""


@given(
    topic=st.sampled_from([topic for topic in topics.OF_RUN if topic.has_dlq]),
    key=st.binary(max_size=40),
    value=st.binary(max_size=60),
    headers=st.lists(
        st.tuples(st.sampled_from(["group", "offset", "reason", "x"]), st.binary(max_size=12)),
        max_size=4,
    ).map(tuple),
)
def test_any_bad_record_can_be_written_and_read_as_a_dead_letter(
    topic: topics.Topic, key: bytes, value: bytes, headers: Headers
):
    bad = torn(topic, key=key, value=value, headers=headers)
    emit = dead_letter(bad, "why")
    assert (emit.topic, emit.partition, emit.key, emit.value) == (topic.dlq_name, 0, key, value)
    letter = letter_of(read_back(emit))
    assert (letter.topic, letter.partition, letter.offset) == (topic.name, 1, 7)
    assert letter.group == group_of(bad)
    hostile = Emit(topic=topic.dlq_name, partition=0, key=key, value=value, headers=headers)
    assert letter_of(read_back(hostile)).topic == topic.name


async def letters(log: MemoryLog, place: Place) -> list[Record]:
    reader = await log.reader({place: 0})
    try:
        return await reader.read(timeout_s=0, records_max=100)
    finally:
        await reader.close()


@pytest.fixture
async def log() -> MemoryLog:
    log = MemoryLog(run="r")
    await log.create_topics({OPENED.dlq_name: 1, topics.FINISHED_COMPLETIONS.dlq_name: 1})
    return log


async def edge(log: MemoryLog, telemetry: Telemetry = QUIET) -> DeadLetters:
    return DeadLetters(log, await log.writer(), service="gateway", telemetry=telemetry)


async def test_an_edge_writes_one_letter_however_often_it_reads_the_record(log: MemoryLog):
    for _ in range(2):  # Two lives of the service.
        dead_letters = await edge(log)
        bad = torn(OPENED, key=b"g-1.0.0")
        assert await dead_letters.write(bad, "why")
        await asyncio.gather(*(dead_letters.write(bad, "why") for _ in range(3)))
    await dead_letters.write(torn(OPENED, key=b"g-1.0.0", offset=8), "why")
    await dead_letters.write(replace(bad, partition=3), "why")
    found = [letter_of(record) for record in await letters(log, dead_letters_of(OPENED))]
    assert [(letter.partition, letter.offset) for letter in found] == [(1, 7), (1, 8), (3, 7)]


async def test_an_edge_leaves_the_records_of_others_alone(log: MemoryLog):
    dead_letters = await edge(log)
    assert not await dead_letters.write(torn(topics.FINISHED_COMPLETIONS, key=b"f" * 32), "why")
    assert await letters(log, dead_letters_of(topics.FINISHED_COMPLETIONS)) == []


async def test_an_edge_counts_each_letter_once_and_has_a_line_for_each_bad_record_it_reads(
    log: MemoryLog,
):
    settings = TelemetrySettings(exporter="prometheus", port=0)
    exporter = exporter_of(settings, service="gateway", resource={})
    assert exporter is not None
    lines = io.StringIO()
    telemetry = Telemetry(service="gateway", exporter=exporter, stream=lines)
    dead_letters = await edge(log, telemetry)
    for bad in (torn(OPENED), torn(OPENED), torn(topics.FINISHED_COMPLETIONS)):
        await dead_letters.write(bad, "why")
    counted = samples(exporter.address, "forgemq_transform_bad_records_total")
    telemetry.close()
    assert [(labels["topic"], value) for labels, value in counted] == [(OPENED.name, 1.0)]
    said = [json.loads(line) for line in lines.getvalue().splitlines()]
    skipped = topics.FINISHED_COMPLETIONS.name
    assert [(line["event"], line["topic"], line["offset"], line["reason"]) for line in said] == [
        ("bad_record", OPENED.name, 7, "why"),
        ("bad_record", OPENED.name, 7, "why"),
        ("bad_record_skipped", skipped, 7, "why"),
    ]
