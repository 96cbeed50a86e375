"""The local overlay as containers: a short run during which processes are killed.

Every pod starts at once and the broker last, as a cluster may start them.
"""

import json
import re
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import docker
import msgspec
import pytest
from docker.models.containers import Container as Running
from msgspec import Struct

from tests.architecture.rendered import rendered
from tests.containers.manifests import Overlay
from tests.containers.pods import POLL_S, TOOL, PodRunner, pod_runner, wait_for_end

pytestmark = [pytest.mark.containers, pytest.mark.long, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
OVERLAY = ROOT / "deploy/kubernetes/overlays/local"
STEPS = 6
GROUPS_PER_STEP = 8
SHORTER = {"\nsteps = 40": f"\nsteps = {STEPS}", "\ntasks = 128": "\ntasks = 8"}
KILLS = {
    0: ("gateway-0/gateway",),
    1: ("scheduler-0/scheduler",),
    2: ("inference-0/inference",),
    3: ("trainer-0/trainer",),
    4: ("reward-0/reward", "merger-0/merger", "auditor-0/auditor", "inference-0/engine"),
}
"""Who is killed after which step."""

END_THEMSELVES = (
    "run-0/demo-model",
    "run-0/create",
    "agents-0/configuration",
    "agents-0/agents",
    "run-0/end",
)

STEP_S_MAX = 600
"""Also the first one, for which the engine starts, on a machine with other work."""

RUN_S_MAX = 1200
"""From the last kill to the end of the last round."""


class Played(Struct, frozen=True, kw_only=True):
    """What the run left: containers are named pod/container.

    Attributes:
        steps: Numbers of the steps that the trainer reported, in their order.
        restarts: How often a container started again by itself.
        audit: What `forgemq audit` printed.
        exits: Statuses after SIGTERM, or after the end of what ends by itself.
        rules: The engine's own record of each container's limits.
    """

    steps: list[int]
    killed: dict[str, int]
    restarts: dict[str, int]
    audit_status: int
    audit: str
    exits: dict[str, int]
    logs: dict[str, str]
    rules: dict[str, dict]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    client = docker.from_env(timeout=120)
    overlay = Overlay(short_run())
    with pod_runner(client, overlay, tmp_path_factory.mktemp("stack")) as runner:
        yield play(runner, overlay)


def short_run() -> list[dict]:
    """The overlay with a shorter run, whose end releases no pods: there is no API to ask."""
    text = (OVERLAY / "run.toml").read_text()
    for old, new in SHORTER.items():
        assert old in text
        text = text.replace(old, new)
    manifests = rendered(OVERLAY, {"run.toml": text})
    (run,) = (m for m in manifests if (m["kind"], m["metadata"]["name"]) == ("Deployment", "run"))
    (end,) = run["spec"]["template"]["spec"]["containers"]
    end["args"] = [each for each in end["args"] if not each.startswith("--release=")]
    return manifests


def play(runner: PodRunner, overlay: Overlay) -> Played:
    workloads = overlay.workloads()
    kafka = workloads.pop("kafka")
    with ThreadPoolExecutor(1) as creating:
        created = creating.submit(runner.start, workloads.pop("run"))
        for workload in workloads.values():
            runner.start(workload)
        runner.start(kafka)
        created.result()
    running = containers_of(runner)
    killed = {}
    for step, names in KILLS.items():
        wait_for_step(running["trainer-0/trainer"], step)
        killed |= {name: kill(running[name]) for name in names}
    exits = {name: wait_for_end(running.pop(name), timeout_s=RUN_S_MAX) for name in END_THEMSELVES}
    audit_status, audit = audited(runner, overlay)
    for container in running.values():
        container.reload()
    restarts = {name: each.attrs["RestartCount"] for name, each in running.items()}
    running.pop("kafka-0/kafka")
    stop_all(running, runner)
    return Played(
        steps=steps_of(running["trainer-0/trainer"]),
        killed=killed,
        restarts=restarts,
        audit_status=audit_status,
        audit=audit,
        exits=exits | {name: wait_for_end(each, timeout_s=1) for name, each in running.items()},
        logs={name: each.logs().decode() for name, each in containers_of(runner).items()},
        rules={name: each.attrs for name, each in containers_of(runner).items()},
    )


def containers_of(runner: PodRunner) -> dict[str, Running]:
    return {
        f"{pod.name}/{name}": container
        for pod in runner.pods.values()
        for name, container in pod.containers.items()
    }


def steps_of(trainer: Running) -> list[int]:
    lines = trainer.logs(stdout=False).decode().splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    return [event["step"] for event in events if event["event"] == "trained"]


def wait_for_step(trainer: Running, step: int) -> None:
    deadline_s = time.monotonic() + STEP_S_MAX
    while step not in steps_of(trainer):
        assert time.monotonic() < deadline_s, f"no step {step} within {STEP_S_MAX} s"
        time.sleep(POLL_S)


def kill(container: Running) -> int:
    """Kill it and start it again; its exit status."""
    container.kill("SIGKILL")
    status = wait_for_end(container, timeout_s=10)
    container.start()
    return status


def audited(runner: PodRunner, overlay: Overlay) -> tuple[int, str]:
    """Status and text of `forgemq audit`, in a pod that sees what a merger sees."""
    like = overlay.workloads()["merger"]
    (container,) = like.containers
    tool = msgspec.structs.replace(container, name="audit", image=TOOL, arguments=("audit", "demo"))
    runner.start(msgspec.structs.replace(like, name="audit", replicas=1, containers=(tool,)))
    running = runner.pods["audit-0"].containers.pop("audit")
    return wait_for_end(running, timeout_s=120), running.logs(stderr=False).decode()


def stop_all(running: Mapping[str, Running], runner: PodRunner) -> None:
    for container in running.values():
        container.reload()
        if container.status == "running":
            container.kill("SIGTERM")
    for name, container in running.items():
        wait_for_end(container, timeout_s=runner.pods[name.split("/")[0]].workload.grace_s)


def test_every_step_of_the_run_is_trained_once(played: Played):
    assert sorted(set(played.steps)) == list(range(STEPS))
    assert {played.exits[name] for name in END_THEMSELVES} == {0}


def test_the_audit_finds_that_every_guarantee_held(played: Played):
    assert played.audit_status == 0, played.audit
    assert re.findall(r"(G\d)\s+\S?\s*(held|DID NOT HOLD)", played.audit) == [
        (f"G{number}", "held") for number in range(1, 6)
    ]
    assert "demo: completed" in played.audit
    assert f"held: {STEPS} steps, {STEPS * GROUPS_PER_STEP} groups" in played.audit


def test_what_was_killed_died_and_nothing_else_restarted(played: Played):
    assert played.killed == {name: 137 for names in KILLS.values() for name in names}
    assert {name: count for name, count in played.restarts.items() if count} == {}


def test_every_process_ends_with_0_within_its_grace(played: Played):
    assert {name: status for name, status in played.exits.items() if status} == {}
    assert {"gateway-0/gateway", "trainer-0/trainer", "inference-0/engine"} <= played.exits.keys()


def test_services_and_the_job_waited_for_a_broker_that_came_last(played: Played):
    assert re.search(r"waiting up to \d+ s for the broker", played.logs["run-0/create"])
    waited = {name for name, text in played.logs.items() if '"waiting_for_run"' in text}
    assert {"scheduler-0/scheduler", "merger-0/merger"} <= waited


def test_every_container_of_ours_ran_without_rights(played: Played):
    for name, found in played.rules.items():
        host = found["HostConfig"]
        assert host["CapDrop"] == ["ALL"], name
        assert host["SecurityOpt"] == ["no-new-privileges"], name
        if name != "kafka-0/kafka":
            assert found["Config"]["User"].split(":")[0] == "65532", name
            assert host["ReadonlyRootfs"], name
