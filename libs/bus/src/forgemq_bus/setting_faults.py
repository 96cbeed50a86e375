"""Settings of a cluster under which a run can lose what was acknowledged; pure rules."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

Settings: TypeAlias = Mapping[str, str]

OFFSETS_RETENTION_MINUTES_MIN = 7 * 24 * 60
"""Kafka's default: shorter ones forget the positions of a run that rests over a week."""

KEPT = "records of a run must stay until the auditor trims them"
TOPIC_RULES: Mapping[str, tuple[str, str]] = {
    "cleanup.policy": ("delete", "records are deleted by trimming alone, never by their key"),
    "retention.ms": ("-1", KEPT),
    "retention.bytes": ("-1", KEPT),
    "unclean.leader.election.enable": (
        "false",
        "a replica that lags can become the leader, and acknowledged records are lost",
    ),
}
"""By setting of a topic: the only value that is safe, and why."""

TOPIC_SETTINGS = (*TOPIC_RULES, "max.message.bytes", "min.insync.replicas")
BROKER_SETTINGS = ("offsets.retention.minutes", "default.replication.factor")


class TopicFacts(NamedTuple):
    """What is known about one topic.

    Attributes:
        replicas: Of the partition that has the fewest.
        settings: As far as they may be read.
    """

    replicas: int
    settings: Settings


class SettingFault(NamedTuple):
    """A setting that is weaker than a run needs.

    Attributes:
        setting: Name on the broker.
        value: As it is.
        where: Which topic or broker, and how many others.
        rule: What it should be, and what happens otherwise.
    """

    setting: str
    value: str
    where: str
    rule: str


def insync_replicas_min(replicas: int) -> int:
    """The least number of copies that an acknowledged record has: the majority of its replicas."""
    return replicas // 2 + 1


def setting_faults(
    *, brokers: Mapping[int, Settings], topics: Mapping[str, TopicFacts], message_bytes_min: int
) -> list[SettingFault]:
    """Name every weak setting, once for all topics or brokers that have it.

    Args:
        brokers: Every broker of the cluster, by its id.
        topics: Topics of the run, by name.
        message_bytes_min: Size of the largest record that is written.
    """
    where: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for node, settings in brokers.items():
        for setting, value, rule in _broker_faults(settings):
            where[setting, value, rule].append(f"broker {node}")
    for name, facts in topics.items():
        found = _topic_faults(facts, brokers=len(brokers), message_bytes_min=message_bytes_min)
        for setting, value, rule in found:
            where[setting, value, rule].append(f"topic {name}")
    return [
        SettingFault(setting, value, _named(names), rule)
        for (setting, value, rule), names in where.items()
    ]


def _broker_faults(settings: Settings) -> Iterator[tuple[str, str, str]]:
    name = "offsets.retention.minutes"
    if name in settings and int(settings[name]) < OFFSETS_RETENTION_MINUTES_MIN:
        yield (
            name,
            settings[name],
            f"at least {OFFSETS_RETENTION_MINUTES_MIN}, and more than the longest pause of a run: "
            "gateway and grading begin at the first record kept if their positions are forgotten",
        )


def _topic_faults(
    facts: TopicFacts, *, brokers: int, message_bytes_min: int
) -> Iterator[tuple[str, str, str]]:
    settings = facts.settings
    for name, (value, rule) in TOPIC_RULES.items():
        if settings.get(name, value) != value:
            yield name, settings[name], f"{value}: {rule}"
    name = "max.message.bytes"
    if int(settings.get(name, message_bytes_min)) < message_bytes_min:
        yield name, settings[name], f"at least {message_bytes_min}: larger records are refused"
    if facts.replicas == 1 < brokers:
        rule = f"3: the cluster has {brokers} brokers, and each record has one copy"
        yield "replication factor", "1", rule
    name, least = "min.insync.replicas", insync_replicas_min(facts.replicas)
    if facts.replicas > 1 and int(settings.get(name, least)) < least:
        rule = (
            f"{least} of {facts.replicas} replicas: an acknowledged record may have only "
            f"{settings[name]} of its copies"
        )
        yield name, settings[name], rule


def _named(names: list[str]) -> str:
    others = len(names) - 1
    return names[0] if not others else f"{names[0]} and {others} more"
