"""kill -9 of the trainer and of an inference process while new weights are on their way.

Each is a whole run on two real engines, whose processes kill themselves once, on the way of version
2 (`kill_points/kill_point.py`). The run completes, nothing is lost, and the audit holds.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.engine_fixture import ENGINE_MODEL, engine_options, reset_engine, started_engine
from tests.integration.fleet_run import FleetRun
from tests.integration.killed_fleet import (
    KILLED_VERSION,
    STEPS,
    of_two_lives,
    play_with_a_kill,
    ways,
)

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def second_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with started_engine(tmp_path_factory.mktemp("second"), engine_options()) as url:
        yield url


@pytest.fixture
def engine_urls(base_engine_url: str, second_url: str) -> str:
    """Two engines on the base weights."""
    reset_engine(second_url, ENGINE_MODEL)
    return f"{base_engine_url},{second_url}"


@pytest.fixture
def play(
    kafka_bootstrap: str, engine_urls: str, new_run_id: Callable[[], str], tmp_path: Path
) -> Callable[..., FleetRun]:
    """Plays a run on two engines with a kill."""
    return partial(
        play_with_a_kill,
        bootstrap=kafka_bootstrap,
        run_id=new_run_id(),
        folder=tmp_path,
        urls=engine_urls,
    )


def test_a_trainer_killed_while_it_relays_a_version_leaves_it_to_its_next_life(
    play,
):
    """Nothing of the version is on the log yet: no lane loads the part that it has of it."""
    fleet = play("trainer", "while the trainer relays", way="relay")
    assert fleet.publications() == of_two_lives(1, again=1)
    broken = [each["weights"] for each in fleet.events("inference-0", "relay_broken")]
    assert broken.count("1.2") == 1
    for lane in range(2):
        loaded = ways(fleet, lane)
        # The next life's first version has the bytes that the lane serves already.
        assert loaded[:3] == [(1, 0, "start"), (1, 1, "fast"), (2, 1, "start")]
        assert_newer_and_fast(loaded[3:])


def test_weights_whose_trainer_dies_before_their_copy_are_lost_and_no_lane_waits_for_them(
    play,
):
    """The broadcast never comes, so a lane goes on with the version before, until the next life."""
    fleet = play("trainer", "before the durable copy", way="gloo")
    assert fleet.publications() == of_two_lives(1, again=1)
    assert fleet.published_early()[0] == (1, 2)
    for lane in range(2):
        loaded = ways(fleet, lane)
        assert loaded[:4] == [
            (1, 0, "start"),
            (1, 1, "fast"),
            (1, 1, "durable"),
            (2, 1, "start"),
        ]
        assert_newer_and_fast(loaded[4:])


def assert_newer_and_fast(loaded: list[tuple[int, int, str]]) -> None:
    """The second life's versions; one is left out if the next is there before a lane begins."""
    versions = [version for _, version, _ in loaded]
    assert versions == sorted(set(versions))
    assert versions[-1] >= STEPS - 1
    assert {(lineage, path) for lineage, _, path in loaded} == {(2, "fast")}


def test_lanes_that_serve_weights_of_a_trainer_that_died_before_its_checkpoint_go_back_with_it(
    play,
):
    """The next life publishes an older version than they serve, and then the same one again."""
    fleet = play("trainer", "before the checkpoint", way="relay")
    assert fleet.publications() == of_two_lives(2, again=1)
    assert fleet.published_early()[0] == (1, 2)
    for lane in range(2):
        loaded = ways(fleet, lane)
        assert loaded[:4] == [
            (1, 0, "start"),
            (1, 1, "fast"),
            (1, 2, "fast"),
            (2, 1, "fast"),
        ]
        assert_newer_and_fast(loaded[4:])


@pytest.mark.parametrize("at", ["while it receives", "between publication and load"])
def test_a_lane_killed_before_it_loads_a_version_has_it_from_the_durable_copy(play, at):
    """The other lane serves the version meanwhile, and the killed one catches up."""
    fleet = play("inference", at, way="relay")
    assert fleet.publications() == [(1, version) for version in range(STEPS + 1)]
    killed, other = fleet.loaded(0), fleet.loaded(1)
    first, second = sorted({each.epoch for each in killed})
    # The successor loads the newest version before it serves: from the durable copy, in a pause.
    start = next(each for each in killed if each.epoch == second)
    assert (start.path, start.version >= KILLED_VERSION) == ("start", True)
    assert start.paused_s > 0
    assert max(each.version for each in killed if each.epoch == first) == KILLED_VERSION - 1
    served = ways(fleet, 0)
    assert served[:2] == [(1, 0, "start"), (1, 1, "fast")]
    assert served[2][:2] == (1, start.version)
    assert {path for *_, path in served[3:]} == {"fast"}
    for lane in range(2):
        versions = [version for _, version, _ in ways(fleet, lane)]
        assert versions == sorted(set(versions))
        assert versions[-1] >= STEPS - 1
    # Of the bytes that the killed process was passing on, the other lane may have none or all.
    met = {each.path for each in other if each.version == KILLED_VERSION}
    assert "fast" in met or (at == "between publication and load" and "durable" in met)
    for name in ("load_failed", "wrong_tensor"):
        assert fleet.events("inference-0", name) == fleet.events("inference-1", name) == []
    # Of a version that a lane was too slow to take, the path is above.
    left_out = [
        (each["lane"], each["version"])
        for each in fleet.events("trainer", "lane_left_out")
        if "timed out" not in each["reason"] and "no byte" not in each["reason"]
    ]
    # The next version may come before the trainer knows that the process is gone.
    assert set(left_out) <= {(0, KILLED_VERSION), (0, KILLED_VERSION + 1)}
    # A copy that is whole may be acknowledged before its process dies.
    assert (0, KILLED_VERSION) in left_out or at == "between publication and load"
