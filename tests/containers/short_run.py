"""A short run of the local overlay in containers: started, watched, audited and stopped."""

import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from docker.models.containers import Container as Running

from tests.architecture.rendered import rendered
from tests.containers.manifests import Overlay
from tests.containers.pods import POLL_S, TOOL, PodRunner, wait_for_end

ROOT = Path(__file__).parents[2]
OVERLAY = ROOT / "deploy/kubernetes/overlays/local"
GROUPS_PER_STEP = 8

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
"""From the last fault to the end of the last round."""


def short_run(*, steps: int) -> list[dict]:
    """The overlay with a shorter run, whose end releases no pods: there is no API to ask."""
    text = (OVERLAY / "run.toml").read_text()
    shorter = {"\nsteps = 40": f"\nsteps = {steps}", "\ntasks = 128": "\ntasks = 8"}
    for old, new in shorter.items():
        assert old in text
        text = text.replace(old, new)
    manifests = rendered(OVERLAY, {"run.toml": text})
    (run,) = (m for m in manifests if (m["kind"], m["metadata"]["name"]) == ("Deployment", "run"))
    (end,) = run["spec"]["template"]["spec"]["containers"]
    end["args"] = [each for each in end["args"] if not each.startswith("--release=")]
    return manifests


def start_broker_last(runner: PodRunner, overlay: Overlay) -> None:
    """Start every pod, the broker's as the last one; the run is announced then."""
    workloads = overlay.workloads()
    kafka = workloads.pop("kafka")
    with ThreadPoolExecutor(1) as creating:
        created = creating.submit(runner.start, workloads.pop("run"))
        for workload in workloads.values():
            runner.start(workload)
        runner.start(kafka)
        created.result()


def containers_of(runner: PodRunner) -> dict[str, Running]:
    return {
        f"{pod.name}/{name}": container
        for pod in runner.pods.values()
        for name, container in pod.containers.items()
    }


def steps_of(trainer: Running) -> list[int]:
    """Numbers of the steps that the trainer reported, in their order."""
    return [each["step"] for each in events_of(trainer) if each["event"] == "trained"]


def events_of(container: Running) -> list[dict]:
    """What a service said, also before it was started again."""
    lines = container.logs(stdout=False).decode().splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"')]


def wait_for_step(trainer: Running, step: int) -> None:
    """Return when this step is trained; one whose trainer died at its end is not reported."""
    deadline_s = time.monotonic() + STEP_S_MAX
    while max(steps_of(trainer), default=-1) < step:
        assert time.monotonic() < deadline_s, f"no step {step} within {STEP_S_MAX} s"
        time.sleep(POLL_S)


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
