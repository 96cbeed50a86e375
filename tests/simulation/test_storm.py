"""Storms: services over the log, killed, fenced and moved at any point, lose and repeat nothing.

A schedule runs the real shell and a real core over the in-memory log. `storm/oracle.py` decides
from the log what went wrong; `make storm SEEDS=n` runs more seeds than this suite.
"""

import dataclasses
import itertools

import pytest

from tests.simulation.storm.cases import CASES
from tests.simulation.storm.faults import Fault, NumberedFaults
from tests.simulation.storm.schedule import points_of, run_numbered, run_seed
from tests.simulation.storm.weather import ALONE, SHARED

pytestmark = pytest.mark.simulation

SEEDS = 120
SEEDS_A_TEST = 30
"""So that the workers of a parallel run share a case."""

LONG = ("merger", "reward", "reward_repeats", "scheduler_dead_letters")
"""Cases of seconds of CPU time."""

# The fast suite runs a few of the seeds of most cases; the full one all of all.
STORMS = [
    pytest.param(
        case, first, id=f"{name}-{first}", marks=pytest.mark.slow if first or name in LONG else []
    )
    for name, case in CASES.items()
    for first in range(0, SEEDS, SEEDS_A_TEST)
]
FEW_RECORDS = dataclasses.replace(ALONE, records=5)
KILL = Fault("kill")
STAND_STILL = Fault("pause", pause_s=8.0)
"""Longer than a session, a restart and a snapshot of the successor, shorter than a transaction."""

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.mark.parametrize(("case", "first_seed"), STORMS)
def test_a_storm_changes_nothing_that_a_service_writes(case, first_seed):
    seeds = range(first_seed, first_seed + SEEDS_A_TEST)
    outcomes = [run_seed(case, seed) for seed in seeds]
    tasks = [task for outcome in outcomes for task in outcome.tasks]
    assert max(task.records_a_batch_max for task in tasks) > 1
    assert sum(outcome.deaths for outcome in outcomes) > SEEDS_A_TEST
    assert sum(outcome.assigned for outcome in outcomes) > SEEDS_A_TEST
    assert sum(outcome.fenced for outcome in outcomes) > 0
    assert sum(outcome.trimmed for outcome in outcomes) > 0
    assert sum(outcome.expired for outcome in outcomes) > 0
    assert (sum(task.ticks for task in tasks) > 0) == bool(case.tick_setting)


def test_a_seed_is_the_same_schedule_every_time():
    first, again = run_seed(CASES["merger"], 7), run_seed(CASES["merger"], 7)
    assert first == again
    assert first.deaths > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", "no_answer"])
@every_case
def test_an_end_at_any_single_point_changes_nothing(case, kind):
    points = points_of(case, ALONE)
    assert set(points) == {
        "open_writer", "opened_writer", "positions", "reader", "read", "commit", "written",
        "committed",
    }  # fmt: skip
    for number in range(len(points)):
        outcome = run_numbered(case, ALONE, NumberedFaults({number: Fault(kind)}))
        assert outcome.deaths == 1, f"nothing ended at point {number}"


@every_case
def test_a_snapshot_is_read_back_although_the_batch_before_it_lacks_its_marker(case):
    weather = dataclasses.replace(ALONE, marker_delay_s=0.5)
    assert run_numbered(case, weather, NumberedFaults()).snapshots_missed == 0


def pairs_of(count: int) -> list[tuple[int, int]]:
    """Every pair of points; the second also behind the restart that the first one causes."""
    return [(n, n + distance) for n in range(count) for distance in range(1, count + 10)]


@pytest.mark.slow
def test_ends_at_any_two_points_change_nothing():
    case = CASES["counting"]
    for pair in pairs_of(len(points_of(case, FEW_RECORDS))):
        run_numbered(case, FEW_RECORDS, NumberedFaults(dict.fromkeys(pair, KILL)))


@pytest.mark.long
@pytest.mark.timeout(600)
@every_case
def test_ends_at_any_two_points_of_any_service_change_nothing(case):
    for pair in pairs_of(len(points_of(case, ALONE))):
        run_numbered(case, ALONE, NumberedFaults(dict.fromkeys(pair, KILL)))


@pytest.mark.slow
@every_case
def test_a_process_that_stands_still_at_any_point_finds_out_that_it_was_replaced(case):
    points = points_of(case, SHARED)
    fenced = 0
    for number in range(len(points)):
        fenced += run_numbered(case, SHARED, NumberedFaults({number: STAND_STILL})).fenced
    assert fenced > 0


@pytest.mark.slow
@every_case
def test_a_zombie_that_restores_from_a_journal_that_is_being_trimmed_stops_as_fenced(case):
    """It stands still in its restore; its successor commits snapshots, and the run is trimmed."""
    count = len(points_of(case, SHARED))
    for killed, distance in itertools.product(range(count // 3, count, 24), range(1, 30)):
        faults = NumberedFaults({killed: KILL, killed + distance: STAND_STILL})
        run_numbered(case, SHARED, faults)
