"""kill -9 of the trainer and of an inference process while new weights are on their way.

Each is a whole run on two real engines, whose processes kill themselves once, on the way of version
2 (`kill_points/kill_point.py`). The run completes, nothing is lost, and the audit holds.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from forgemq_contracts.weights import LoadedWeights
from tests.engine_fixture import ENGINE_MODEL, engine_options, reset_engine, started_engine
from tests.integration.fleet_run import FleetRun

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(1500)]

STEPS = 5
KILL_POINTS = Path(__file__).with_name("kill_points")


@pytest.fixture(scope="module")
def second_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with started_engine(tmp_path_factory.mktemp("second"), engine_options()) as url:
        yield url


@pytest.fixture
def engine_urls(base_engine_url: str, second_url: str) -> str:
    """Two engines on the base weights."""
    reset_engine(second_url, ENGINE_MODEL)
    return f"{base_engine_url},{second_url}"


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


def test_a_trainer_killed_while_it_relays_a_version_leaves_it_to_its_next_life(
    kafka_bootstrap, engine_urls, new_run_id, tmp_path
):
    """Nothing of the version is on the log yet: no lane loads the part that it has of it."""
    fleet = play_with_a_kill(
        "trainer",
        "while the trainer relays",
        bootstrap=kafka_bootstrap,
        run_id=new_run_id(),
        folder=tmp_path,
        urls=engine_urls,
        way="relay",
    )
    assert [(each.lineage, each.version) for each in fleet.published()] == [
        (1, 0),
        (1, 1),
        *((2, version) for version in range(1, STEPS + 1)),
    ]
    (broken,) = fleet.events("inference-0", "relay_broken")
    assert broken["weights"] == "1.2"
    for lane in range(2):
        # The next life's first version has the bytes that the lane serves already.
        assert ways(fleet.loaded(lane))[:6] == [
            (1, 0, "start"),
            (1, 1, "fast"),
            (2, 1, "start"),
            (2, 2, "fast"),
            (2, 3, "fast"),
            (2, 4, "fast"),
        ]


@pytest.mark.parametrize(("way", "path"), [("relay", "fast"), ("gloo", "durable")])
def test_a_version_that_a_trainer_published_before_its_kill_is_served_by_every_lane(
    kafka_bootstrap, engine_urls, new_run_id, tmp_path, way, path
):
    """By relay its files are there already; a broadcast never comes, and the durable copy is."""
    fleet = play_with_a_kill(
        "trainer",
        "after the trainer has published",
        bootstrap=kafka_bootstrap,
        run_id=new_run_id(),
        folder=tmp_path,
        urls=engine_urls,
        way=way,
    )
    assert [(each.lineage, each.version) for each in fleet.published()] == [
        (1, 0),
        (1, 1),
        (1, 2),
        *((2, version) for version in range(2, STEPS + 1)),
    ]
    for lane in range(2):
        assert ways(fleet.loaded(lane))[:6] == [
            (1, 0, "start"),
            (1, 1, "fast"),
            (1, 2, path),
            (2, 2, "start"),
            (2, 3, "fast"),
            (2, 4, "fast"),
        ]


@pytest.mark.parametrize("at", ["while it receives", "between publication and load"])
def test_a_lane_killed_before_it_loads_a_version_has_it_from_the_durable_copy(
    kafka_bootstrap, engine_urls, new_run_id, tmp_path, at
):
    """The other lane serves the version meanwhile, and the killed one catches up."""
    fleet = play_with_a_kill(
        "inference",
        at,
        bootstrap=kafka_bootstrap,
        run_id=new_run_id(),
        folder=tmp_path,
        urls=engine_urls,
        way="relay",
    )
    assert [(each.lineage, each.version) for each in fleet.published()] == [
        (1, version) for version in range(STEPS + 1)
    ]
    killed, other = fleet.loaded(0), fleet.loaded(1)
    first, second = sorted({each.epoch for each in killed})
    before = [each for each in killed if each.epoch == first]
    # The next version may arrive while the lane still loads the first one.
    assert ways(before) in ([(1, 0, "start")], [(1, 0, "start"), (1, 1, "fast")])
    # Its successor loads the newest version before it serves: from the durable copy, in a pause.
    start, *after = [each for each in killed if each.epoch == second]
    assert start.path == "start"
    assert start.version >= 2
    assert start.paused_s > 0
    assert {each.path for each in after} == {"fast"}
    for lane in (killed, other):
        versions = [each.version for each in lane]
        assert versions == sorted(set(versions))
        assert versions[-1] >= STEPS - 1
    assert (1, 2, "fast") in ways(other) or at == "between publication and load"
    for name in ("load_failed", "wrong_tensor"):
        assert fleet.events("inference-0", name) == fleet.events("inference-1", name) == []
    left_out = [
        (each["lane"], each["version"]) for each in fleet.events("trainer", "lane_left_out")
    ]
    assert left_out == ([(0, 2)] if at == "while it receives" else [])
