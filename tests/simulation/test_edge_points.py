"""Gateways, engines and graders end at every point of a small run in turn: nothing is lost.

The oracles are those of the storm. `make storm CASE=<case> FIRST=<point> SEEDS=1` runs one again.
"""

import pytest

from tests.simulation.storm.points import FAULTS, edge_points, run_edge_point

pytestmark = pytest.mark.simulation

FAST = ("grader_killed", "grader_unanswered")
"""Cases of a second or less of CPU time; the fast suite runs a tenth of `gateway_killed` too."""

LONG = tuple(case for case in FAULTS if case.startswith(("gateway", "takeover")))
"""Cases of minutes of CPU time."""

SAMPLED_EVERY = 11
"""Of their points `make test` tries each eleventh; a prime, since the calls of a turn repeat."""

WRITES = {"commit", "written", "committed", "open_writer", "opened_writer", "positions", "reader"}


# A schedule that hangs is found by the virtual clock; this is for a machine that is busy.
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("case", "every"),
    [
        *[
            pytest.param(case, 1, marks=[] if case in FAST else pytest.mark.slow)
            for case in FAULTS
            if case not in LONG
        ],
        *[pytest.param(case, SAMPLED_EVERY, marks=pytest.mark.slow) for case in LONG],
        *[pytest.param(case, 1, marks=pytest.mark.long) for case in LONG],
    ],
)
def test_a_fault_at_any_single_point_of_an_edge_loses_and_doubles_nothing(case, every):
    points = edge_points(case)
    expected = {"asked", "sampled", "answered"} if case == "engine_killed" else {"read", *WRITES}
    is_gateway = case.startswith(("gateway", "takeover"))
    assert set(points) == (expected | {"promise"} if is_gateway else expected)
    numbers = range(0, len(points), every)
    outcomes = [run_edge_point(case, number) for number in numbers]
    if case in ("gateway_killed", "grader_killed", "grader_unanswered"):
        assert [outcome.deaths for outcome in outcomes] == [1] * len(numbers)
    if case.startswith("takeover"):
        assert sum(outcome.left for outcome in outcomes) > 0
    if case == "graders_stand_still":
        assert sum(outcome.fenced for outcome in outcomes) > 0


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=pytest.mark.slow if n % 48 else []) for n in range(0, 120, 12)],
)
def test_a_gateway_that_is_killed_at_a_point_leaves_its_run_to_the_next_one(number):
    outcome = run_edge_point("gateway_killed", number)
    assert (outcome.deaths, outcome.trained) == (1, 1)
