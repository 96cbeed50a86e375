"""Writes a Strimzi user for each service of a run, with the rights that the registry gives it.

    python deploy/kubernetes/kafka_users.py FOLDER --run RUN

`kafka-users.yaml` has the users and their access rules; `kafka-logins.yaml` are patches by which
each service's pods take their own user's password. A test compares both with what the services
declare.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from forgemq_bus.names import broker_topic, in_run
from forgemq_contracts import topics

CLUSTER = "forgemq"
"""Name of the overlay's Kafka object."""
CREATOR = "run"
"""The workload that creates topics, ends the run and reads all of it."""
WORKLOADS = {
    "auditor": "Deployment",
    "console": "Deployment",
    "gateway": "StatefulSet",
    "inference": "StatefulSet",
    "merger": "Deployment",
    "reward": "Deployment",
    "scheduler": "Deployment",
    "trainer": "StatefulSet",
}
"""All that read or write the log under a name of their own; agents do not."""
GENERATED = "# Written by deploy/kubernetes/kafka_users.py.\n"

Rule = dict[str, object]


def user_of(workload: str) -> str:
    """Name of the Kafka user, and of the secret that Strimzi makes for it."""
    return f"forgemq-{workload}"


def rules_of(service: str, *, run: str) -> list[Rule]:
    """What this service may do on the broker."""
    own = in_run(service, run=run)
    reads = [topic.name for topic in topics.ALL if service in topic.consumers]
    if service == "scheduler":
        reads += [topic.dlq_name for topic in topics.OF_RUN if topic.has_dlq]
    writes = [topic.name for topic in topics.ALL if topic.producer == service]
    writes += [topic.dlq_name for topic in topics.ALL if topic.dead_letters_by == service]
    rules = [
        _topic(
            broker_topic(name, run=run),
            *["Read"] * (name in reads),
            *["Write"] * (name in writes),
            "Describe",
        )
        for name in dict.fromkeys(reads + writes)
    ]
    rules += [
        # Groups and transactions begin with the service's name: `merger-needed`, `merger-0`.
        _rule("group", own, "Read", "Describe"),
        _rule("transactionalId", own, "Write", "Describe"),
        # Each service names settings of its topics and brokers that can cost records.
        _rule("topic", in_run("", run=run), "Describe", "DescribeConfigs"),
        _cluster("DescribeConfigs"),
    ]
    if service == "auditor":
        # It deletes records that no group needs any more, and blobs that no record names.
        rules += [
            _rule("topic", in_run("", run=run), "Read", "Delete"),
            _rule("group", in_run("", run=run), "Describe"),
        ]
    return rules


def creator_rules(*, run: str) -> list[Rule]:
    """What the workload `run` may do: create and read all of the run, announce and end it.

    A person in its pod may also ask the run to end.
    """
    shared = [
        _topic(topic.name, "Create", "Read", "Write", "Describe", "DescribeConfigs")
        for topic in topics.SHARED
    ]
    own = [
        _topic(broker_topic(topic.name, run=run), "Write")
        for topic in topics.OF_RUN
        if topic.producer == "launcher"
    ]
    return [
        *shared,
        *own,
        # It adds partitions when the run is given room for more lanes.
        _rule(
            "topic", in_run("", run=run), "Create", "Alter", "Read", "Describe", "DescribeConfigs"
        ),
        _rule("group", in_run("", run=run), "Describe"),
        _cluster("DescribeConfigs"),
    ]


def lag_rules(*, run: str) -> list[Rule]:
    """What KEDA may do: look how far groups of the run are behind."""
    return [
        _rule("topic", in_run("", run=run), "Describe"),
        _rule("group", in_run("", run=run), "Describe"),
    ]


def users(*, run: str) -> Iterator[dict[str, object]]:
    """Every user of the run, as objects of Strimzi."""
    rules = {service: rules_of(service, run=run) for service in WORKLOADS}
    rules |= {CREATOR: creator_rules(run=run), "lag": lag_rules(run=run)}
    for name, acls in sorted(rules.items()):
        yield {
            "apiVersion": "kafka.strimzi.io/v1",
            "kind": "KafkaUser",
            "metadata": {"name": user_of(name), "labels": {"strimzi.io/cluster": CLUSTER}},
            "spec": {
                "authentication": {"type": "scram-sha-512"},
                "authorization": {"type": "simple", "acls": acls},
            },
        }


def logins() -> Iterator[dict[str, object]]:
    """A patch for each workload: its user's name and password, by reference."""
    for name, kind in sorted((WORKLOADS | {CREATOR: "Deployment"}).items()):
        containers = {"containers": [{"name": name, "env": _login(name)}]}
        if name == CREATOR:
            containers = {
                "initContainers": [{"name": "create", "env": _login(name)}],
                "containers": [{"name": "end", "env": _login(name)}],
            }
        yield {
            "apiVersion": "apps/v1",
            "kind": kind,
            "metadata": {"name": name},
            "spec": {"template": {"spec": containers}},
        }


def _login(workload: str) -> list[dict[str, object]]:
    name = user_of(workload)
    password = {"secretKeyRef": {"name": name, "key": "password"}}
    return [
        {"name": "FORGEMQ_KAFKA_SASL_USERNAME", "value": name},
        {"name": "FORGEMQ_KAFKA_SASL_PASSWORD", "valueFrom": password},
    ]


def _topic(name: str, *operations: str) -> Rule:
    return _rule("topic", name, *operations, pattern="literal")


def _rule(kind: str, name: str, *operations: str, pattern: str = "prefix") -> Rule:
    resource = {"type": kind, "name": name, "patternType": pattern}
    return {"resource": resource, "operations": list(operations)}


def _cluster(*operations: str) -> Rule:
    return {"resource": {"type": "cluster"}, "operations": list(operations)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description="Kafka users of a run, for Strimzi")
    parser.add_argument("folder", type=Path, help="of the overlay")
    parser.add_argument("--run", required=True, help="FORGEMQ_RUN of the overlay")
    options = parser.parse_args(arguments)
    for name, objects in (
        ("kafka-users.yaml", users(run=options.run)),
        ("kafka-logins.yaml", logins()),
    ):
        text = yaml.safe_dump_all(objects, sort_keys=False, default_flow_style=None, width=120)
        (options.folder / name).write_text(GENERATED + text)


if __name__ == "__main__":
    main()
