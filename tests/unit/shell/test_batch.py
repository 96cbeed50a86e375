import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgemq_bus.log import Emit, Place, Record
from forgemq_contracts import topics
from forgemq_contracts.groups import RetiredGroup, ScoredGroup
from forgemq_contracts.journal import JournalInput
from forgemq_shell.batch import Batch, digest
from tests.simulation.counting_core import CountingCore

SCORED = topics.SCORED_GROUPS.name
RETIRED = topics.RETIRED_GROUPS.name
HEADERS = (("traceparent", b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"),)


def record(offset: int, *, topic: str = SCORED, value: bytes | None = None) -> Record:
    kind = {
        SCORED: ScoredGroup(group_id="g-1", domain="d", purpose="train", episodes=()),
        RETIRED: RetiredGroup(group_id="g-1", domain="d", purpose="train", reason="stale"),
    }[topic]
    return Record(
        topic=topic,
        partition=2,
        offset=offset,
        timestamp_ms=1,
        key=b"g-1",
        value=topics.encode(kind) if value is None else value,
        headers=(("tracestate", b"x"),),
    )


def test_neighbouring_records_of_one_partition_are_one_range_and_order_is_kept():
    batch = Batch(CountingCore(), service="merger")
    for item in (record(3), record(4), record(7), record(0, topic=RETIRED)):
        batch.record(item)
    batch.tick(250)
    batch.record(record(1, topic=RETIRED))
    assert batch.inputs == (
        JournalInput(topic=SCORED, partition=2, offset=3, count=5),
        JournalInput(topic=RETIRED, partition=2, offset=0, count=1),
        JournalInput(tick_ms=250),
        JournalInput(topic=RETIRED, partition=2, offset=1, count=1),
    )
    assert batch.positions == {Place(SCORED, 2): 8, Place(RETIRED, 2): 2}


def test_outputs_carry_their_inputs_trace_and_the_registrys_key():
    batch = Batch(CountingCore(partition=2), service="merger")
    assert batch.record(record(0), headers=HEADERS) is None
    (emit,) = batch.emits
    assert (emit.topic, emit.partition, emit.key) == (topics.MERGED_GROUPS.name, 2, b"g-1")
    assert emit.headers == HEADERS
    assert topics.decode(topics.MERGED_GROUPS, emit.value).loss_tokens == 1


@given(st.binary(max_size=64))
def test_a_record_that_does_not_decode_goes_to_the_dead_letter_topic_byte_for_byte(value: bytes):
    batch = Batch(CountingCore(), service="merger")
    bad = batch.record(record(9, value=value))
    (letter,) = batch.emits
    assert bad is not None
    assert (letter.topic, letter.partition, letter.key) == (f"{SCORED}-dlq", 0, b"g-1")
    assert letter.value == value
    headers = dict(letter.headers)
    assert headers["reason"].decode() == bad.reason
    assert (headers["topic"], headers["partition"], headers["offset"]) == (
        SCORED.encode(),
        b"2",
        b"9",
    )
    assert headers["tracestate"] == b"x"
    assert batch.positions == {Place(SCORED, 2): 10}


def test_a_record_the_core_refuses_is_a_bad_record_and_the_state_is_unchanged():
    core = CountingCore()
    batch = Batch(core, service="merger")
    batch.record(record(0, topic=RETIRED))
    before = core.snapshot()
    bad = batch.record(record(0))
    assert bad is not None
    assert bad.reason == "refused: g-1 is retired"
    assert core.snapshot() == before


def test_a_record_whose_dead_letter_another_service_writes_is_skipped_and_reported():
    batch = Batch(CountingCore(), service="console")
    bad = batch.record(record(4, value=b"\xc1"))
    assert bad is not None
    assert not bad.has_dead_letter
    assert batch.emits == []
    assert batch.positions == {Place(SCORED, 2): 5}


def test_a_record_that_a_core_refuses_gets_its_dead_letter_from_that_service():
    batch = Batch(CountingCore(), service="console")
    batch.record(record(0, topic=RETIRED))
    bad = batch.record(record(0))
    assert bad is not None
    assert bad.has_dead_letter
    assert [emit.topic for emit in batch.emits] == [f"{SCORED}-dlq"]


def test_a_broken_invariant_dies_and_names_the_record():
    batch = Batch(CountingCore(), service="merger")
    batch.tick(1000)
    with pytest.raises(AssertionError, match="run time went back"):
        batch.tick(999)
    strange = Record(
        topic=topics.GRADED_EPISODES.name,
        partition=0,
        offset=5,
        timestamp_ms=0,
        key=b"",
        value=topics.encode(
            topics.GRADED_EPISODES.record(
                episode_id="g-1.0.0",
                group_id="g-1",
                grader="m:f",
                grader_version="1",
                outcome=0.0,
                speed=0.0,
            )
        ),
    )
    with pytest.raises(AssertionError) as died:
        batch.record(strange)
    assert died.value.__notes__ == ["while handling graded-episodes-v1/0@5"]


EMITS = st.lists(
    st.builds(
        Emit,
        topic=st.sampled_from(["a", "b"]),
        partition=st.integers(0, 1),
        key=st.binary(max_size=2),
        value=st.binary(max_size=2),
    ),
    max_size=3,
)


@given(EMITS, EMITS)
def test_only_the_same_records_in_the_same_order_have_the_same_digest(left: list, right: list):
    assert (digest(left) == digest(right)) == (left == right)
