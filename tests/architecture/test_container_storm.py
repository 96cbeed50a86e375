"""`make storm-containers`: its schedules are drawn as documented, and hit what the overlay has."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

from tests.architecture.rendered import pods
from tests.containers.storm.schedule import (
    CLOCK_STEPS_S,
    CONTAINERS,
    EPISODE_LEASE_S,
    KINDS,
    LEASE_S_MAX,
    LINKS,
    PODS,
    SERVICES,
    schedule,
)
from tests.containers.storm.stepped_clock import VARIABLES, SteppedClock
from tests.containers.storm.verdict import Left, defects

OVERLAY = Path(__file__).parents[2] / "deploy/kubernetes/overlays/local"
PRINTED = """\
from tests.containers.storm.schedule import schedule
print(*schedule(4), sep="\\n")
"""
SCHEDULE_4 = """\
after step 0: drop all packets between agents-0 and gateway-0 for 13 s
after step 1: step the clock of inference-0/inference by +3600 s, restarts included, for 14 s
after step 2: pause scheduler-0/scheduler for 36 s
after step 3: kill -9 scheduler-0/scheduler, started again after 6 s
after step 4: kill -9 kafka-0/kafka, started again after 10 s
after step 5: fill the disk of kafka-0/kafka for 24 s
after step 6: take agents-0 off the network for 10 s
after step 7: kill -9 gateway-0/gateway, started again after 8 s
"""
TIMED = """
import datetime, sys, time
wall_s, monotonic_s = time.time(), time.monotonic()
for _ in sys.stdin:
    time.sleep(0.001)
    seconds = datetime.datetime.now().timestamp()
    print([time.time() - wall_s, seconds - wall_s], flush=True)
print(time.monotonic() - monotonic_s)
"""
HELD = Left(
    audit_status=0,
    audit="demo: completed\n"
    + "".join(f"| G{number} | held: 2 steps, 16 groups |\n" for number in range(1, 6)),
    exits={"gateway-0/gateway": 0},
    failures={},
)


def hit(kind: str, *, seeds: range) -> list[tuple[str, str]]:
    faults = [fault for seed in seeds for fault in schedule(seed)]
    return [(fault.whom, fault.other) for fault in faults if fault.kind == kind]


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_a_seed_is_the_same_schedule_in_every_process(hash_seed: str):
    printed = subprocess.run(
        [sys.executable, "-c", PRINTED],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed.stdout == SCHEDULE_4


@pytest.mark.parametrize("seed", range(20))
def test_each_schedule_has_every_kind_one_after_each_step(seed: int):
    faults = schedule(seed)
    assert sorted(fault.kind for fault in faults) == sorted(KINDS)
    assert [fault.after_step for fault in faults] == list(range(len(KINDS)))
    assert all(fault.for_s > LEASE_S_MAX for fault in faults if fault.kind == "pause")


def test_seeds_in_a_row_hit_everybody_once():
    assert sorted(hit("kill", seeds=range(4))) == sorted((each, "") for each in CONTAINERS)
    assert sorted(hit("pause", seeds=range(12))) == sorted((each, "") for each in CONTAINERS)
    assert sorted(hit("cut", seeds=range(len(LINKS)))) == sorted(LINKS)
    assert sorted(hit("disconnect", seeds=range(len(PODS)))) == sorted((each, "") for each in PODS)
    stepped = hit("clock_step", seeds=range(len(SERVICES)))
    assert sorted(stepped) == sorted((each, "") for each in SERVICES)
    steps_s = [fault.step_s for seed in range(4) for fault in schedule(seed) if fault.step_s]
    assert sorted(steps_s) == sorted(CLOCK_STEPS_S)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_stepped_clock_moves_the_wall_clock_alone(tmp_path: Path):
    clock = SteppedClock(tmp_path / "clock")
    inside = {"LD_PRELOAD": "library.so", "STEPPED_CLOCK_FILE": "seconds"}
    assert {Path(value).name for value in VARIABLES.values()} == set(inside.values())
    with subprocess.Popen(
        [sys.executable, "-c", TIMED],
        env={**os.environ, **{key: str(clock.folder / name) for key, name in inside.items()}},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for step_s in (0, 3600, -3600):
            clock.step(step_s)
            process.stdin.write("\n")
            process.stdin.flush()
            walls = json.loads(process.stdout.readline())
            assert walls == pytest.approx([step_s] * 2, abs=30)
        process.stdin.close()
        assert json.loads(process.stdout.readline()) < 30
    assert process.returncode == 0


@pytest.mark.slow
def test_every_container_of_the_overlay_that_stays_is_hit():
    assert set(CONTAINERS) == {
        f"{name}-0/{container['name']}"
        for name, pod in pods(OVERLAY).items()
        for container in pod["containers"]
    }


def test_the_longest_lease_is_the_overlays():
    assert tomllib.loads((OVERLAY / "run.toml").read_text())["episodes"]["lease_s"] == (
        EPISODE_LEASE_S
    )
    assert LEASE_S_MAX == EPISODE_LEASE_S


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, []),
        ({"exits": {"gateway-0/gateway": 1}}, ["gateway-0/gateway ended with 1"]),
        ({"audit_status": 1}, ["the audit ended with 1"]),
        (
            {"audit": HELD.audit.replace("| G3 | held", "| G3 | DID NOT HOLD")},
            ["G3: DID NOT HOLD"],
        ),
        (
            {"audit": HELD.audit.replace("G4", "G9")},
            ["G4: the audit does not name it"],
        ),
        (
            {"audit": HELD.audit.replace("16 groups", "15 groups")},
            ["the audit does not say 'held: 2 steps, 16 groups'"],
        ),
        (
            {"audit": HELD.audit.replace("completed", "running")},
            ["the audit does not say 'demo: completed'"],
        ),
    ],
)
def test_what_does_not_hold_is_named(changed: dict, found: list[str]):
    assert defects(msgspec.structs.replace(HELD, **changed), steps=2, groups=16) == found
