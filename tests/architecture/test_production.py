"""The production overlay gives each service what its code needs on broker and network, no more."""

import importlib
import importlib.util
import tomllib
from collections.abc import Iterator
from functools import cache
from types import ModuleType

import pytest

from forgemq_bus.kafka_topics import MESSAGE_BYTES_MAX
from forgemq_bus.setting_faults import setting_faults
from forgemq_contracts import topics
from forgemq_contracts.topics import Topic
from forgemq_gateway.fenced_writer import writer_of
from forgemq_gateway.marks import NEEDED_GROUP
from forgemq_gateway.ownership import OWNERS_WRITER
from forgemq_launcher.core.configuration import configuration, document
from forgemq_reward.grading_loop import INPUTS
from forgemq_reward.grading_positions import GROUP
from forgemq_scheduler.app import DEAD_LETTERS
from forgemq_shell.transform_settings import TransformSettings
from forgemq_telemetry.catalogue import GAUGES
from tests.architecture.rendered import ROOT, SERVICES, config_map, manifests, pods
from tests.architecture.test_overlays import asked

OVERLAY = ROOT / "deploy/kubernetes/overlays/production"
RUN = "production"
ON_BROKER = sorted(set(SERVICES) - {"agents", "launcher"})
TRANSFORMS = ("merger", "reward", "scheduler")


def script() -> ModuleType:
    path = ROOT / "deploy/kubernetes/kafka_users.py"
    specification = importlib.util.spec_from_file_location("kafka_users", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def objects(kind: str) -> dict[str, dict]:
    return {m["metadata"]["name"]: m for m in manifests(OVERLAY) if m["kind"] == kind}


def rules(service: str) -> Iterator[tuple[str, str, str, set[str]]]:
    """Kind, name, pattern and operations of each access rule of this service's user."""
    for each in objects("KafkaUser")[f"forgemq-{service}"]["spec"]["authorization"]["acls"]:
        resource = each["resource"]
        pattern = resource.get("patternType", "literal")
        yield resource["type"], resource.get("name", ""), pattern, set(each["operations"])


def may(service: str, operation: str, kind: str, name: str) -> bool:
    """Whether a rule allows it, as the broker decides."""
    return any(
        (of_kind, operation in operations) == (kind, True)
        and (name == own or (pattern == "prefix" and name.startswith(own)))
        for of_kind, own, pattern, operations in rules(service)
    )


def on_broker(name: str) -> str:
    return name if name in {topic.name for topic in topics.SHARED} else f"{RUN}.{name}"


def declared(service: str, table: str) -> set[str]:
    found: tuple[Topic, ...] = getattr(importlib.import_module(f"forgemq_{service}.app"), table)
    return {topic.name for topic in found}


@cache
def made():
    return configuration(
        document(config_map(OVERLAY, "forgemq-run-file")["run.toml"], overrides=[]),
        run=RUN,
        folder=ROOT,
    )


def test_the_users_are_those_that_the_script_writes_for_the_overlays_run(tmp_path):
    assert config_map(OVERLAY, "forgemq-run")["FORGEMQ_RUN"] == RUN
    script().main([str(tmp_path), "--run", RUN])
    for name in ("kafka-users.yaml", "kafka-logins.yaml"):
        assert (OVERLAY / name).read_text() == (tmp_path / name).read_text()


@pytest.mark.parametrize("service", ON_BROKER)
def test_a_service_reads_and_writes_the_topics_that_its_code_declares_and_no_others(service: str):
    own_journal = {t.name for t in topics.ALL if t.name == f"{service}-journal-v1"}
    letters = {t.dlq_name for t in topics.ALL if t.dead_letters_by == service}
    reads = declared(service, "CONSUMES") | own_journal | {topics.STARTED_RUNS.name}
    writes = declared(service, "PRODUCES") | own_journal | letters
    if service == "scheduler":
        reads |= {topic.dlq_name for topic in DEAD_LETTERS}
    every = {t.name for t in topics.ALL} | {t.dlq_name for t in topics.ALL if t.has_dlq}
    readable = {name for name in every if may(service, "Read", "topic", on_broker(name))}
    writable = {name for name in every if may(service, "Write", "topic", on_broker(name))}
    assert writable == writes
    if service == "auditor":
        # Its sweep reads headers of every topic of the run, in search of blobs.
        reads |= {name for name in every if on_broker(name) != name}
    if service == "scheduler":
        # All dead letters, though those of topics of the run say nothing of a group.
        reads |= {t.dlq_name for t in topics.OF_RUN if t.has_dlq}
    assert readable == reads
    deletes = {name for name in every if may(service, "Delete", "topic", on_broker(name))}
    assert deletes == ({n for n in every if on_broker(n) != n} if service == "auditor" else set())
    assert not may(service, "Read", "topic", "another-run.finished-episodes-v1")


def test_the_pod_that_ends_the_run_may_ask_for_its_end_and_write_no_services_records():
    written = {t.name for t in topics.ALL if may("run", "Write", "topic", on_broker(t.name))}
    assert written == declared("launcher", "PRODUCES")


@pytest.mark.parametrize("service", TRANSFORMS)
def test_a_transform_may_use_its_groups_and_transactions(service: str):
    app = importlib.import_module(f"forgemq_{service}.app")
    plan = app.transform_of(made(), {}).plan(0, configuration=made(), settings=TransformSettings())
    for group in (service, plan.positions_group, plan.needed_group):
        assert may(service, "Read", "group", on_broker(group))
    assert may(service, "Write", "transactionalId", on_broker(plan.transactional_id))
    other = "reward" if service == "merger" else "merger"
    assert not may(other, "Read", "group", on_broker(plan.positions_group))
    assert not may(other, "Write", "transactionalId", on_broker(plan.transactional_id))


def test_other_groups_and_transactions_are_their_services_too():
    assert may("reward", "Read", "group", on_broker(GROUP))
    assert may("reward", "Write", "transactionalId", on_broker(f"{GROUP}-0"))
    for name in (NEEDED_GROUP, OWNERS_WRITER, writer_of("a-gateway")):
        assert may("gateway", "Read", "group", on_broker(name))
        assert may("gateway", "Write", "transactionalId", on_broker(name))
    for service in ("auditor", "trainer"):
        name = topics.needed_group(service)
        assert may(service, "Read", "group", on_broker(name))
        assert may(service, "Write", "transactionalId", on_broker(service))
    needed = {group for topic in topics.ALL for group in topic.needed_by}
    assert all(may("auditor", "Describe", "group", on_broker(group)) for group in needed)


@pytest.mark.parametrize("service", ON_BROKER)
def test_a_pod_logs_in_as_its_own_user_by_reference(service: str):
    (container,) = (c for c in pods(OVERLAY)[service]["containers"] if c["name"] == service)
    env = {each["name"]: each for each in container["env"]}
    reference = env["FORGEMQ_KAFKA_SASL_PASSWORD"]["valueFrom"]["secretKeyRef"]
    assert env["FORGEMQ_KAFKA_SASL_USERNAME"]["value"] == f"forgemq-{service}"
    assert reference == {"name": f"forgemq-{service}", "key": "password"}
    assert not objects("Secret"), "no secret is in the overlay"


def triggers(kind: str) -> dict[str, dict[str, str]]:
    """Metadata of the triggers of this kind, by what they scale."""
    every = {name: each["spec"]["triggers"][0] for name, each in objects("ScaledObject").items()}
    return {name: each["metadata"] for name, each in every.items() if each["type"] == kind}


def test_what_scales_by_lag_names_the_groups_and_topics_that_the_code_commits():
    found = triggers("kafka")
    merger = importlib.import_module("forgemq_merger.app").transform_of(made(), {})
    plan = merger.plan(0, configuration=made(), settings=TransformSettings())
    assert found["merger"]["consumerGroup"] == on_broker(plan.positions_group)
    assert found["merger"]["topic"] == on_broker(topics.SCORED_GROUPS.name)
    assert topics.SCORED_GROUPS in merger.inputs
    assert found["reward"]["consumerGroup"] == on_broker(GROUP)
    assert found["reward"]["topic"] == on_broker(topics.FINISHED_EPISODES.name)
    assert topics.FINISHED_EPISODES in INPUTS
    for name, metadata in found.items():
        scaled = objects("ScaledObject")[name]["spec"]
        assert scaled["maxReplicaCount"] == made().log.group_partitions
        # What always stays behind, one marker in each partition, must ask for no second pod.
        assert int(metadata["lagThreshold"]) >= made().log.group_partitions
        assert metadata["offsetResetPolicy"] == "earliest", "where services begin"
        assert metadata["bootstrapServers"].startswith("forgemq-kafka-bootstrap.forgemq.svc:")
        for kind, what in (("group", "consumerGroup"), ("topic", "topic")):
            assert may("lag", "Describe", kind, metadata[what])


def test_keda_logs_in_by_an_authentication_alone_as_a_user_that_exists():
    """The scaler takes name and password from there, and ignores a name in the trigger."""
    for scaled, metadata in triggers("kafka").items():
        (trigger,) = objects("ScaledObject")[scaled]["spec"]["triggers"]
        given = objects("TriggerAuthentication")[trigger["authenticationRef"]["name"]]["spec"]
        assert "username" not in metadata
        (name,) = given["configMapTargetRef"]
        assert name["parameter"] == "username"
        user = objects("ConfigMap")[name["name"]]["data"][name["key"]]
        assert user in objects("KafkaUser")
        references = {r["parameter"]: (r["name"], r["key"]) for r in given["secretTargetRef"]}
        assert references == {
            "password": (user, "password"),
            "ca": (f"{script().CLUSTER}-cluster-ca-cert", "ca.crt"),
        }
        assert (metadata["sasl"], metadata["tls"]) == ("scram_sha512", "enable")


def test_agents_scale_by_their_open_episodes_to_as_many_as_play_all_that_queues_admit():
    metadata, scaled = triggers("prometheus")["agents"], objects("ScaledObject")["agents"]["spec"]
    (namespace,) = {m["metadata"]["namespace"] for m in manifests(OVERLAY) if m["kind"] == "Role"}
    metric, label = "gateway.episodes_open", f'{{run="{namespace}"}}'
    assert metric in GAUGES
    assert metadata["query"] == f"sum(forgemq_{metric.replace('.', '_')}{label})"
    played = made().episodes.concurrent_max
    assert float(metadata["threshold"]) == played
    assert scaled["maxReplicaCount"] * played >= sum(q.slots * q.group_size for q in made().queues)
    assert metadata["ignoreNullValues"] == "false", "without Prometheus there is nothing to go by"
    (policy,) = scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"][
        "policies"
    ]
    assert (policy["type"], policy["value"]) == ("Pods", 1)


def test_keda_alone_decides_how_many_pods_there_are_of_what_it_scales():
    assert objects("ScaledObject").keys() == {"agents", "merger", "reward"}
    for name, each in objects("ScaledObject").items():
        assert each["spec"]["scaleTargetRef"]["name"] == name
        assert "replicas" not in objects("Deployment")[name]["spec"]


def matches(selector: dict, labels: dict[str, str]) -> bool:
    """Whether a label selector picks these labels."""
    return all(labels.get(k) == v for k, v in selector.get("matchLabels", {}).items()) and all(
        labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", ())
    )


def picks(peer: dict, source: str, namespace: str) -> bool:
    """Whether a rule's peer is a pod of this service, in the run's namespace or in another."""
    of_namespace = peer.get("namespaceSelector")
    if of_namespace is None:
        is_there = not namespace
    else:
        is_there = matches(of_namespace, {"kubernetes.io/metadata.name": namespace})
    return is_there and matches(peer.get("podSelector", {}), {"app.kubernetes.io/name": source})


def reaches(source: str, target: str, port: int, *, namespace: str = "") -> bool:
    """Whether ingress rules let a pod of one service connect to another's port."""
    closed = [
        each["spec"]
        for each in objects("NetworkPolicy").values()
        if "Ingress" in each["spec"]["policyTypes"]
        and matches(each["spec"]["podSelector"], {"app.kubernetes.io/name": target})
    ]
    assert closed, f"{target} is open to all"
    return any(
        any(picks(peer, source, namespace) for peer in rule["from"])
        and any(each["port"] <= port <= each.get("endPort", each["port"]) for each in rule["ports"])
        for policy in closed
        for rule in policy.get("ingress", ())
    )


def test_engine_gloo_and_broker_are_closed_to_all_but_their_users():
    every = {*SERVICES, "run"} - {"launcher"}
    assert {name for name in every if reaches(name, "inference", 30000)} == set()
    assert {name for name in every if reaches(name, "inference", 40000)} == {"inference", "trainer"}
    assert {name for name in every if reaches(name, "trainer", 40000)} == {"inference", "trainer"}
    assert {name for name in every if reaches(name, "gateway", 8000)} == {
        *("agents", "gateway", "reward")
    }
    for name in every - {"run"}:
        assert reaches("prometheus", name, 9600, namespace="monitoring"), name
        assert not reaches("prometheus", name, 9600, namespace="default"), name
        assert not reaches("prometheus", name, 30000, namespace="monitoring"), name
    (listener,) = objects("Kafka")["forgemq"]["spec"]["kafka"]["listeners"]
    peers = [p["podSelector"] for p in listener["networkPolicyPeers"] if "podSelector" in p]
    users = {
        name for name in every for peer in peers if matches(peer, {"app.kubernetes.io/name": name})
    }
    assert users == every - {"agents"}
    assert listener["tls"] is True


def test_records_survive_the_loss_of_a_broker():
    kafka = objects("Kafka")["forgemq"]["spec"]["kafka"]["config"]
    pool = objects("KafkaNodePool")["brokers"]["spec"]
    assert pool["replicas"] == 3
    assert (kafka["default.replication.factor"], kafka["min.insync.replicas"]) == (3, 2)
    assert kafka["transaction.state.log.min.isr"] == 2
    assert kafka["unclean.leader.election.enable"] is False


def test_brokers_replicate_the_largest_records_and_keep_positions_over_a_pause():
    """What deploy/kafka asks of a cluster's brokers."""
    kafka = objects("Kafka")["forgemq"]["spec"]["kafka"]["config"]
    for name in ("replica.fetch.max.bytes", "replica.fetch.response.max.bytes"):
        assert kafka[name] >= MESSAGE_BYTES_MAX
    settings = {name: str(value) for name, value in kafka.items()}
    assert setting_faults(brokers={0: settings}, topics={}, message_bytes_min=1) == []
    assert "offsets.retention.minutes" in settings


def test_the_quota_holds_the_run_at_its_largest():
    hard = objects("ResourceQuota")["forgemq"]["spec"]["hard"]
    largest = {n: s["spec"]["maxReplicaCount"] for n, s in objects("ScaledObject").items()}
    cores = memory_bytes = gpus = 0.0
    for name, pod in pods(OVERLAY).items():
        (each,) = (objects(k)[name] for k in ("Deployment", "StatefulSet") if name in objects(k))
        replicas = largest.get(name, each["spec"].get("replicas", 1))
        cores += replicas * sum(asked(c, "cpu") for c in pod["containers"])
        memory_bytes += replicas * sum(asked(c, "memory") for c in pod["containers"])
        limits = [c["resources"].get("limits", {}) for c in pod["containers"]]
        gpus += replicas * sum(float(limit.get("nvidia.com/gpu", 0)) for limit in limits)
    brokers = objects("KafkaNodePool")["brokers"]["spec"]
    cores += brokers["replicas"] * asked(brokers, "cpu")
    memory_bytes += brokers["replicas"] * asked(brokers, "memory")
    assert cores <= float(hard["requests.cpu"])
    assert memory_bytes <= asked(
        {"resources": {"requests": {"memory": hard["requests.memory"]}}}, "memory"
    )
    assert gpus == float(hard["requests.nvidia.com/gpu"])


def test_every_service_has_a_priority_that_exists_and_replicas_are_spread():
    classes = objects("PriorityClass").keys()
    for name, pod in pods(OVERLAY).items():
        assert pod["priorityClassName"] in classes, name
        if name != "agents":
            assert pod["topologySpreadConstraints"], name


def test_a_drain_evicts_one_pod_of_each_service_at_a_time_but_of_the_trainer():
    budgets = {
        b["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"]: b["spec"]["maxUnavailable"]
        for b in objects("PodDisruptionBudget").values()
    }
    assert budgets == dict.fromkeys(set(SERVICES) - {"launcher", "trainer"}, 1)


def test_no_agent_pushes_a_broker_from_its_node():
    """A pod without a priority has 0, and agents have more."""
    values = {name: each["value"] for name, each in objects("PriorityClass").items()}
    operators = objects("Kafka")["forgemq"]["spec"]["entityOperator"]
    for each in (objects("KafkaNodePool")["brokers"]["spec"], operators):
        named = each["template"]["pod"]["priorityClassName"]
        assert values[named] > values[pods(OVERLAY)["agents"]["priorityClassName"]]
        assert values[named] >= max(values.values())


def test_no_container_that_works_asks_for_more_memory_than_the_namespace_would_let_it_have():
    """Without a limit of its own a container gets the namespace's, which is 1 GiB."""
    for name, pod in pods(OVERLAY).items():
        for container in pod["containers"]:
            assert "memory" in container["resources"]["limits"], (name, container["name"])


def test_the_script_and_the_overlay_name_the_same_cluster():
    assert script().CLUSTER in objects("Kafka")

    assert tomllib.loads(config_map(OVERLAY, "forgemq-run-file")["run.toml"])["run"] == RUN
