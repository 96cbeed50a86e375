"""Which settings of a cluster are named, and how."""

import pytest

from forgemq_bus.setting_faults import SettingFault, TopicFacts, insync_replicas_min, setting_faults

SAFE = {
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "unclean.leader.election.enable": "false",
    "max.message.bytes": "9000000",
    "min.insync.replicas": "2",
}
WEEK = {"offsets.retention.minutes": "10080", "default.replication.factor": "3"}


def faults(
    *, brokers: int = 3, replicas: int = 3, broker: dict | None = None, **topic: str
) -> list[SettingFault]:
    settings = SAFE | {name.replace("_", "."): value for name, value in topic.items()}
    return setting_faults(
        brokers=dict.fromkeys(range(brokers), WEEK | (broker or {})),
        topics={name: TopicFacts(replicas, settings) for name in ("r.a", "r.b", "r.c")},
        message_bytes_min=8_500_000,
    )


def test_a_safe_cluster_and_a_single_broker_have_no_fault():
    assert faults() == []
    assert faults(brokers=1, replicas=1, min_insync_replicas="1") == []


@pytest.mark.parametrize(
    ("setting", "value", "rule"),
    [
        ("cleanup.policy", "compact", "delete: records are deleted by trimming alone"),
        ("retention.ms", "604800000", "-1: records of a run must stay until the auditor trims"),
        ("retention.bytes", "1000", "-1: records of a run must stay until the auditor trims"),
        ("unclean.leader.election.enable", "true", "false: a replica that lags can become"),
        ("max.message.bytes", "1048588", "at least 8500000: larger records are refused"),
        ("min.insync.replicas", "1", "2 of 3 replicas: an acknowledged record may have only 1 of"),
    ],
)
def test_a_weak_setting_of_topics_is_named_once(setting: str, value: str, rule: str):
    (fault,) = faults(**{setting.replace(".", "_"): value})
    assert fault[:3] == (setting, value, "topic r.a and 2 more")
    assert fault.rule.startswith(rule)


def test_one_copy_on_several_brokers_is_named():
    (fault,) = faults(replicas=1, min_insync_replicas="1")
    assert fault[:2] == ("replication factor", "1")
    assert fault.rule == "3: the cluster has 3 brokers, and each record has one copy"


def test_positions_that_are_forgotten_within_a_week_are_named():
    (fault,) = faults(broker={"offsets.retention.minutes": "1440"})
    assert fault[:3] == ("offsets.retention.minutes", "1440", "broker 0 and 2 more")
    assert fault.rule.startswith("at least 10080, and more than the longest pause of a run")


def test_what_may_not_be_read_is_not_named():
    assert setting_faults(brokers={1: {}, 2: {}}, topics={}, message_bytes_min=1) == []
    unread = {"r.a": TopicFacts(3, {})}
    assert setting_faults(brokers={1: {}}, topics=unread, message_bytes_min=1) == []


@pytest.mark.parametrize(("replicas", "least"), [(1, 1), (2, 2), (3, 2), (5, 3)])
def test_an_acknowledged_record_has_the_majority_of_its_copies(replicas: int, least: int):
    assert insync_replicas_min(replicas) == least
