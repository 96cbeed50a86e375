"""Whole runs of a few steps in which a service kills itself once, on the way of version 2."""

import os
from collections.abc import Sequence
from pathlib import Path

from forgemq_contracts.weights import LoadedWeights
from tests.integration.fleet_run import FleetRun

STEPS = 5
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


def ways(loaded: list[LoadedWeights]) -> list[tuple[int, int, str]]:
    """Lineage, version and path of what a lane served."""
    return [(each.lineage, each.version, each.path) for each in loaded]


def of_two_lives(last: int, *, again: int) -> list[tuple[int, int]]:
    """Lineage and version of what a trainer that is killed publishes, and then its next life.

    Args:
        last: The newest version of the first life.
        again: The first version of the next one, which publishes all that follow.
    """
    first = [(1, version) for version in range(last + 1)]
    return [*first, *((2, version) for version in range(again, STEPS + 1))]
