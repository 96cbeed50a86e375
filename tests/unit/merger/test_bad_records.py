"""What becomes of a group whose score does not decode."""

import msgspec

from forgemq.bus.log import Record
from forgemq.contracts import topics
from forgemq.contracts.run import Model, Queue, RunConfiguration, Trainer
from forgemq.merger.bad_records import FailedGroups
from tests.unit.merger.records import scored

HOOK = FailedGroups(
    RunConfiguration(
        run="test",
        seed=0,
        model=Model(path="model"),
        queues=tuple(Queue(domain=name, task_source="", agent="") for name in ("first", "second")),
        trainer=Trainer(steps=1),
    )
)


def record(
    value: bytes, *, key: bytes = b"g-1", topic: topics.Topic = topics.SCORED_GROUPS
) -> Record:
    return Record(topic=topic.name, partition=2, offset=7, timestamp_ms=0, key=key, value=value)


def test_an_unreadable_score_fails_its_group():
    [output] = HOOK(record(b"\xc1 torn"), "does not decode")
    assert (output.topic, output.partition) == ("merged-groups-v1", 2)
    merged = output.record
    assert (merged.group_id, merged.domain, merged.not_trainable) == ("g-1", "first", "failed")
    assert (merged.partition, merged.tree_sha256) == (2, None)
    assert merged.detail == "scored-groups-v1 at offset 7 is no record: does not decode"


def test_domain_and_purpose_are_read_where_they_can_be():
    fields = {**msgspec.to_builtins(scored()), "domain": "second", "purpose": "eval"}
    broken = msgspec.msgpack.encode({**fields, "not_trainable": "strange"})
    [output] = HOOK(record(broken), "Invalid enum value 'strange'")
    assert (output.record.domain, output.record.purpose) == ("second", "eval")


def test_a_key_that_is_no_group_id_fails_nothing():
    assert HOOK(record(b"", key=b"\xff ? \xff"), "") == ()
    assert HOOK(record(b"", topic=topics.RETIRED_GROUPS), "") == ()
