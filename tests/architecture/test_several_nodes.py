"""The production overlay's trainer over several nodes: its numbers, names and volumes agree."""

import pytest

from forgemq_trainer.ranks.nodes import nodes_of
from tests.architecture.rendered import environ, manifests, pods
from tests.architecture.test_production import OVERLAY, made, objects, reaches


def trainer() -> dict:
    return objects("StatefulSet")["trainer"]["spec"]


def container() -> dict:
    (found,) = (c for c in pods(OVERLAY)["trainer"]["containers"] if c["name"] == "trainer")
    return found


@pytest.mark.slow
def test_the_runs_ranks_are_those_of_all_pods_and_each_has_a_gpu():
    nodes = nodes_of(environ(OVERLAY, container()))
    assert trainer()["replicas"] == nodes.count == 2
    assert " ".join(container()["command"]) == "python -m forgemq_trainer.ranks.torchrun"
    (ranks,) = container()["args"]
    assert made().trainer.world_size == nodes.count * int(ranks)
    assert container()["resources"]["limits"]["nvidia.com/gpu"] == ranks


@pytest.mark.slow
def test_the_pods_meet_at_the_first_by_a_name_that_resolves_before_any_is_ready():
    nodes = nodes_of(environ(OVERLAY, container()))
    assert nodes.is_first, "the settings are those of the pod trainer-0"
    host, _, port = nodes.rendezvous.partition(":")
    service = objects("Service")["trainer"]["spec"]
    assert host == f"trainer-0.{trainer()['serviceName']}"
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert int(port) in {each["port"] for each in service["ports"]}
    assert trainer()["podManagementPolicy"] == "Parallel", "none is ready before all are there"
    for each in (int(port), 32768, 60999):
        assert reaches("trainer", "trainer", each)
        assert not reaches("agents", "trainer", each)


def test_every_rank_sees_the_checkpoints_and_no_two_pods_are_on_one_node():
    claims = {v["name"]: v.get("persistentVolumeClaim", {}) for v in trainer_volumes()}
    claim = claims["checkpoints"]["claimName"]
    (found,) = (
        m["spec"]
        for m in manifests(OVERLAY)
        if m["kind"] == "PersistentVolumeClaim" and m["metadata"]["name"] == claim
    )
    assert found["accessModes"] == ["ReadWriteMany"]
    assert "volumeClaimTemplates" not in trainer(), "a claim of each pod"
    mounts = {each["name"]: each["mountPath"] for each in container()["volumeMounts"]}
    assert mounts["checkpoints"] == "/checkpoints"
    assert {"model", "code"} < mounts.keys()
    (rule,) = pods(OVERLAY)["trainer"]["affinity"]["podAntiAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert rule["topologyKey"] == "kubernetes.io/hostname"


def trainer_volumes() -> list[dict]:
    return pods(OVERLAY)["trainer"]["volumes"]


def test_a_pod_of_another_template_does_not_join_those_of_this_one():
    env = {each["name"]: each for each in container()["env"]}
    field = env["FORGEMQ_NODES_REVISION"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert field == "metadata.labels['controller-revision-hash']"


def test_ranks_have_their_grace_before_the_pods_is_over():
    grace_s = float(environ(OVERLAY, container())["FORGEMQ_SERVICE_STOP_GRACE_S"])
    assert grace_s + 5 < pods(OVERLAY)["trainer"]["terminationGracePeriodSeconds"]
