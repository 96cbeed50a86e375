"""Plays seeds of the storm on the stack in containers; `make storm-containers SEEDS=n` calls it.

Exit status: 0 if every run came to its end and every guarantee held, 1 if not, 2 if this machine
cannot play it. Logs are in build/storm-containers/<seed>.
"""

import argparse
import os
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import docker

from tests.containers.short_run import GROUPS_PER_STEP
from tests.containers.storm.played import play
from tests.containers.storm.schedule import STEPS, schedule
from tests.containers.storm.verdict import Left, defects
from tests.docker_engine import HOW_TO, docker_answers

FOLDER = Path(__file__).parents[3] / "build/storm-containers"
PROGRAMS = ("cc", "mount", "umount", "nsenter", "iptables", "kubectl")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="make storm-containers")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print the schedules, play none")
    chosen = parser.parse_args(arguments)
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    if not chosen.show and (lacking := lacking_here()):
        say(f"storm-containers: {lacking}")
        return 2
    found = 0
    for seed in seeds:
        say(f"seed {seed}")
        for fault in schedule(seed):
            say(f"  {fault}")
        found += 0 if chosen.show else played(seed)
    say(f"{len(seeds)} schedules, {found} with a defect")
    return 1 if found else 0


def lacking_here() -> str:
    """What this machine lacks; "" if nothing."""
    if not docker_answers():
        return HOW_TO
    if os.geteuid() != 0:
        return "needs root: it mounts a small disk and drops packets of single containers"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"needs {', '.join(missing)}" if missing else ""


def played(seed: int) -> int:
    """Play a seed and print what came of it; the number of runs with a defect, 0 or 1."""
    folder, began_s = FOLDER / str(seed), time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def say_when(line: str) -> None:
        say(f"  {time.monotonic() - began_s:4.0f} s: {line}")

    try:
        left = play(schedule(seed), folder, client=docker.from_env(timeout=120), say=say_when)
    except Exception as error:  # noqa: BLE001 - printed with its seed, the next one runs
        found = ["".join(traceback.format_exception(error))]
    else:
        found = defects(left, steps=STEPS, groups=STEPS * GROUPS_PER_STEP)
        for line in ended(left):
            say(f"  {line}")
    for line in found:
        say(f"DEFECT seed {seed}: {line}")
    outcome = "has a defect" if found else "held"
    say_when(f"seed {seed} {outcome}; logs: {folder / 'logs'}")
    say(f"  again: make storm-containers FIRST={seed} SEEDS=1")
    return 1 if found else 0


def ended(left: Left) -> list[str]:
    """One line for each service that ended by itself, with its last words."""
    return [
        f"{name} ended by itself {len(errors)} times: {errors[-1]}"
        for name, errors in sorted(left.failures.items())
    ]


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
