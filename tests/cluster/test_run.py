"""overlays/local on a real node: a short run in which pods are deleted, replaced and scaled."""

import json
import re
from pathlib import Path

import docker
import pytest
from msgspec import Struct

from tests.cluster.cluster_run import STEP_WITHIN_S, ClusterRun, last_step, wait_until
from tests.cluster.local_overlay import (
    GROUPS_PER_STEP,
    STEPS,
    changed_objects,
    first_objects,
    images,
    policies,
    volumes,
)
from tests.cluster.node import Node
from tests.containers.images import image_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(7200)]

DELETED = {
    0: ("statefulset/gateway",),
    1: ("deployment/scheduler", "deployment/reward", "deployment/merger"),
    2: ("statefulset/inference",),
    3: ("statefulset/trainer",),
}
"""Whose pods are deleted after which step."""

CHANGED_AFTER, RESTARTED_AFTER = 4, 5
GATEWAY, ENGINE, BROKER = "gateway:8000", "inference-0.inference:30000", "kafka:9092"
REACHED = {
    "agents": {GATEWAY},
    "reward": {GATEWAY, BROKER},
    "trainer": {BROKER},
    "merger": {BROKER},
}
"""By workload, which of the three it can open a connection to."""
WORKLOADS = (
    "statefulset/kafka",
    "deployment/run",
    "statefulset/gateway",
    "statefulset/inference",
    "statefulset/trainer",
    "deployment/reward",
    "deployment/merger",
    "deployment/scheduler",
    "deployment/auditor",
    "deployment/console",
    "deployment/agents",
)
AUDIT = ("/venv/bin/python", "-m", "forgemq_launcher", "audit", "demo")
STAYS = {"console", "kafka", "run"}
"""Which workloads have pods after the end."""


class Played(Struct, frozen=True, kw_only=True):
    """What the run left.

    Attributes:
        rolled: Which workloads the second apply gave a new state.
        replaced: Which workloads' pods it replaced.
        reached: Which of gateway, engine and broker pods of a workload could connect to.
        restarts: Of containers that started again by themselves, by pod, until a step well before
            the last. At the end agents end with 0, and start again until their pods are given back.
        failed: Containers that ended by themselves with another status, by pod, until the end.
        refused: What the cluster says of pods that it could not create.
        after: Which workloads have pods after the end.
        audit: What `forgemq audit` printed.
        report: What the pod `run` left.
    """

    rolled: set[str]
    replaced: set[str]
    reached: dict[str, set[str]]
    restarts: dict[str, dict[str, int]]
    failed: dict[str, list[str]]
    refused: list[str]
    after: set[str]
    audit: str
    report: dict


@pytest.fixture(scope="module")
def played(cluster_node: Node, tmp_path_factory: pytest.TempPathFactory) -> Played:
    objects = first_objects()
    show_images(cluster_node, objects)
    run = ClusterRun(cluster_node)
    with run.timed("everything ready"):
        run.apply([*volumes(objects, cluster_node.folder / "volumes"), *objects, *policies()])
        run.wait_rolled(*WORKLOADS)
    return play(run, tmp_path_factory.mktemp("report"))


def show_images(node: Node, objects: list[dict]) -> None:
    """Let the node have every image under the name that the overlay, or its next tag, says."""
    client = docker.from_env(timeout=120)
    for name in sorted(images(objects) | images(changed_objects())):
        full = name if "/" in name else f"library/{name}"
        node.images.show(image_of(name, client), names=[f"docker.io/{full}"], client=client)
    client.close()


def play(run: ClusterRun, folder: Path) -> Played:
    for step, workloads in DELETED.items():
        run.wait_for_step(step)
        for each in workloads:
            run.delete_pods(each)
    run.wait_for_step(CHANGED_AFTER)
    rolled, replaced = apply_again(run)
    reached = {
        workload: {to for to in (GATEWAY, ENGINE, BROKER) if run.reaches(workload, to)}
        for workload in REACHED
    }
    run.wait_for_step(RESTARTED_AFTER)
    restarts = {name: pod.restarts for name, pod in run.pods().items() if pod.restarts}
    reward = "deployment/reward"
    run.change("restart reward", "rollout", "restart", reward, rolled=[reward])
    for count in (2, 1):
        run.change(
            f"scale reward to {count}", "scale", reward, f"--replicas={count}", rolled=[reward]
        )
    run.wait_for_step(last_step())
    failed = {name: pod.failed for name, pod in run.pods().items() if pod.failed}
    wait_for_end(run)
    pod = run.pod_of("run")
    run.kubectl("cp", f"{pod}:/reports/demo", str(folder))
    return Played(
        rolled=rolled,
        replaced=replaced,
        reached=reached,
        restarts=restarts,
        failed=failed,
        refused=[
            each["message"] for each in run.items("events") if each["reason"] == "FailedCreate"
        ],
        after={each.workload for each in run.pods().values()},
        audit=run.kubectl("exec", pod, "--", *AUDIT),
        report=json.loads((folder / "report.json").read_text()),
    )


def apply_again(run: ClusterRun) -> tuple[set[str], set[str]]:
    """Apply the changed overlay; which workloads got a new state, and which new pods."""
    generations = run.generations()
    before = {pod.uid: pod.workload for pod in run.pods().values()}
    run.apply(changed_objects())
    now = run.generations()
    run.wait_rolled(*WORKLOADS)
    left = {pod.uid for pod in run.pods().values()}
    return (
        {name for name in now if now[name] > generations[name]},
        {workload for uid, workload in before.items() if uid not in left},
    )


def wait_for_end(run: ClusterRun) -> None:
    """Return once the pod `run` gave the others back and left its report."""
    pod = run.pod_of("run")

    def is_over() -> bool:
        has_report = "report.json" in run.kubectl("exec", pod, "--", "ls", "-R", "/reports")
        return has_report and {each.workload for each in run.pods().values()} <= STAYS

    wait_until(is_over, "end", within_s=STEP_WITHIN_S)


def test_every_guarantee_held_over_all_that_was_done_to_the_run(played: Played):
    assert re.findall(r"(G\d)\s+\S?\s*(held|DID NOT HOLD)", played.audit) == [
        (f"G{number}", "held") for number in range(1, 6)
    ], played.audit
    assert "demo: completed" in played.audit
    assert f"held: {STEPS} steps, {STEPS * GROUPS_PER_STEP} groups" in played.audit


def test_a_second_apply_rolls_what_another_tag_or_run_file_changed_and_nothing_else(played: Played):
    assert played.rolled == {"merger", "console", "run", "agents"}
    assert played.replaced == played.rolled


def test_a_pod_reaches_what_a_network_policy_names_and_nothing_else(played: Played):
    assert played.reached == REACHED


def test_no_container_started_again_by_itself(played: Played):
    assert (played.restarts, played.failed) == ({}, {})


def test_the_standard_restricted_refused_no_pod(played: Played):
    assert played.refused == []


def test_the_end_gives_the_other_pods_back_and_leaves_the_report(played: Played):
    assert played.after == STAYS
    assert played.report["run"] == "demo"
