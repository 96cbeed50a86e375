"""Plays a schedule on the stack, and says what does not hold afterwards."""

from collections.abc import Callable, Sequence
from pathlib import Path

import docker
from docker.models.containers import Container as Running
from docker.types import Mount

from tests.containers.manifests import Overlay
from tests.containers.pods import Changes, PodRunner, pod_runner, wait_for_end
from tests.containers.short_run import (
    END_THEMSELVES,
    RUN_S_MAX,
    audited,
    containers_of,
    events_of,
    short_run,
    start_broker_last,
    stop_all,
    wait_for_step,
)
from tests.containers.storm.faults import Faults, is_up
from tests.containers.storm.schedule import BROKER, STEPS, Fault
from tests.containers.storm.small_disk import small_disk
from tests.containers.storm.stepped_clock import FOLDER_INSIDE, VARIABLES, SteppedClock
from tests.containers.storm.verdict import Left

BROKER_GROUP = 1000
DISK_BYTES = 512 * 2**20
"""Of the broker: a run of ten steps takes about a tenth of it."""

TRAINER = "trainer-0/trainer"


def play(
    faults: Sequence[Fault],
    folder: Path,
    *,
    client: docker.DockerClient,
    say: Callable[[str], None],
) -> Left:
    """Run the stack with these faults to its end; its logs are in the folder afterwards.

    Raises:
        AssertionError: the run does not come to its end.
    """
    overlay = Overlay(short_run(steps=STEPS))
    disk_folder, clock = folder / "disk", SteppedClock(folder / "clock")
    clock_mount = Mount(FOLDER_INSIDE, str(clock.folder), type="bind", read_only=True)
    stepped = [fault.whom for fault in faults if fault.kind == "clock_step"]
    changes = Changes(
        folders={f"{BROKER.split('/')[0]}-data": disk_folder},
        variables=dict.fromkeys(stepped, VARIABLES),
        mounts=dict.fromkeys(stepped, (clock_mount,)),
    )
    with (
        small_disk(disk_folder, size_bytes=DISK_BYTES, group=BROKER_GROUP) as disk,
        pod_runner(client, overlay, folder, changes=changes) as runner,
    ):
        start_broker_last(runner, overlay)
        happening = Faults(runner, disk=disk, clock=clock)
        for fault in faults:
            wait_for_step(containers_of(runner)[TRAINER], fault.after_step)
            say(f"{fault}")
            happening.play(fault)
        say("no more faults")
        return _left(runner, overlay)


def _left(runner: PodRunner, overlay: Overlay) -> Left:
    running = containers_of(runner)
    exits = {name: wait_for_end(running.pop(name), timeout_s=RUN_S_MAX) for name in END_THEMSELVES}
    audit_status, audit = audited(runner, overlay)
    failures = {name: failures_of(each) for name, each in containers_of(runner).items()}
    running.pop(BROKER)
    for container in running.values():
        is_up(container)
    stop_all(running, runner)
    return Left(
        audit_status=audit_status,
        audit=audit,
        exits=exits | {name: wait_for_end(each, timeout_s=1) for name, each in running.items()},
        failures={name: found for name, found in failures.items() if found},
    )


def failures_of(container: Running) -> tuple[str, ...]:
    """Why it ended, each time that it ended by itself and was not well."""
    ends = {"failed", "refused"}
    return tuple(each["error"] for each in events_of(container) if each["event"] in ends)
