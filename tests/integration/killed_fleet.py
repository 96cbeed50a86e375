"""Whole runs of a few steps in which a service kills itself once, on the way of version 2."""

import os
from collections.abc import Sequence
from pathlib import Path

from tests.integration.fleet_run import FleetRun

STEPS = 5
KILLED_VERSION = 2
LATE_MAX = 2
"""Loads of one lane, of six."""
TOO_SLOW = ("no answer within", "Disconnected", "reset by peer", "not whole after")
"""Of the reasons that a lane gives: not that an engine is another one, or holds other bytes."""
KILL_POINTS = Path(__file__).with_name("kill_points")


def play_with_a_kill(
    service: str,
    at: str,
    *,
    bootstrap: str,
    run_id: str,
    folder: Path,
    urls: str = "",
    way: str,
    overrides: Sequence[str] = (),
) -> FleetRun:
    """Play a run whose service kills itself on the way of version 2.

    Args:
        service: Which one.
        at: Its kill point.
        bootstrap: Address of the broker.
        run_id: Of the run.
        folder: For the run's own files.
        urls: Of two engines; "" for one that the launcher starts.
        way: The trainer's fast path.
        overrides: More settings of the run.
    """
    mark = folder / "killed"
    python_path = [str(KILL_POINTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    fleet = FleetRun.on(
        bootstrap,
        run_id,
        folder / "run",
        steps=STEPS,
        lanes=2 if urls else 1,
        environ={
            **({"FORGEMQ_ENGINE_URL": urls} if urls else {}),
            "FORGEMQ_TRAINER_FAST_PATH": way,
            "PYTHONPATH": os.pathsep.join(python_path),
            "KILLED_SERVICE": service,
            "KILLED_AT": at,
            "KILLED_MARK": str(mark),
        },
    )
    fleet.play(*overrides)
    assert mark.exists()
    name = service if service == "trainer" else f"{service}-0"
    assert fleet.run.output().count("was killed by SIGKILL;") == 1, fleet.run.story()
    assert f"{name} was killed by SIGKILL;" in fleet.run.output(), fleet.run.story()
    return fleet


def ways(fleet: FleetRun, lane: int) -> list[tuple[int, int, str]]:
    """Lineage, version and path of what a lane served of a run, as if it had been in time.

    A machine may be too busy for that: see `_late`. Such a load counts as a fast one, and one that
    only brings the same version back does not count. There are few: a fast path that does not work
    has no excuse.
    """
    late = _late(fleet, lane)
    assert len(late) <= LATE_MAX, late
    found: list[tuple[int, int, str]] = []
    for each in fleet.loaded(lane):
        is_late = f"{each.lineage}.{each.version}" in late
        is_again = bool(found) and found[-1][:2] == (each.lineage, each.version)
        if not (is_late and is_again and each.path == "start"):
            path = "fast" if is_late else each.path
            found.append((each.lineage, each.version, path))
    return found


def _late(fleet: FleetRun, lane: int) -> set[str]:
    """Versions that a lane says it loaded in another way since something took too long.

    No byte of them came for seconds, or their lane had lapsed when they were published; or the
    engine did not answer, so that the lane gave it up and attached it again.
    """
    late, is_lost = set(), False
    names = ("engine_lost", "relay_failed", "loaded_weights")
    for event in fleet.events(f"inference-{lane}", *names):
        if event["event"] == "loaded_weights":
            late.update([event["weights"]] if is_lost else [])
            is_lost = False
        elif any(reason in event["error"] for reason in TOO_SLOW):
            is_lost |= event["event"] == "engine_lost"
            late.update([event["weights"]] if event["event"] == "relay_failed" else [])
    for each in fleet.published():
        offered = [way.lane for way in (*each.relayed_to, *each.fast_paths)]
        if each.version > KILLED_VERSION and lane not in offered:
            late.add(f"{each.lineage}.{each.version}")
    return late


def of_two_lives(last: int, *, again: int) -> list[tuple[int, int]]:
    """Lineage and version of what a trainer that is killed publishes, and then its next life.

    Args:
        last: The newest version of the first life.
        again: The first version of the next one, which publishes all that follow.
    """
    first = [(1, version) for version in range(last + 1)]
    return [*first, *((2, version) for version in range(again, STEPS + 1))]
