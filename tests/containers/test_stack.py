"""The local overlay as containers: a short run during which processes are killed.

Every pod starts at once and the broker last, as a cluster may start them.
"""

import re
from collections.abc import Iterator

import docker
import pytest
from docker.models.containers import Container as Running
from msgspec import Struct

from tests.containers.manifests import Overlay
from tests.containers.pods import PodRunner, pod_runner, wait_for_end
from tests.containers.short_run import (
    END_THEMSELVES,
    GROUPS_PER_STEP,
    RUN_S_MAX,
    audited,
    containers_of,
    short_run,
    start_broker_last,
    steps_of,
    stop_all,
    wait_for_step,
)

pytestmark = [pytest.mark.containers, pytest.mark.long, pytest.mark.timeout(3600)]

STEPS = 6
KILLS = {
    0: ("gateway-0/gateway",),
    1: ("scheduler-0/scheduler",),
    2: ("inference-0/inference",),
    3: ("trainer-0/trainer",),
    4: ("reward-0/reward", "merger-0/merger", "auditor-0/auditor", "inference-0/engine"),
}
"""Who is killed after which step."""


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
    overlay = Overlay(short_run(steps=STEPS))
    with pod_runner(client, overlay, tmp_path_factory.mktemp("stack")) as runner:
        yield play(runner, overlay)


def play(runner: PodRunner, overlay: Overlay) -> Played:
    start_broker_last(runner, overlay)
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


def kill(container: Running) -> int:
    """Kill the container and start it again; returns its exit status."""
    container.kill("SIGKILL")
    status = wait_for_end(container, timeout_s=10)
    container.start()
    return status


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
