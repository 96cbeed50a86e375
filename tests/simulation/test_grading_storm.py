"""The grading loop in a storm: every episode is graded, and no position goes back."""

import pytest

from tests.simulation.storm.grading import run_grading_seed

SEEDS_A_TEST = 60

pytestmark = [pytest.mark.simulation, pytest.mark.slow]


@pytest.mark.parametrize("first_seed", [0, SEEDS_A_TEST])
def test_a_storm_leaves_no_episode_without_a_grade(first_seed):
    outcomes = [run_grading_seed(seed) for seed in range(first_seed, first_seed + SEEDS_A_TEST)]
    assert sum(outcome.deaths for outcome in outcomes) > SEEDS_A_TEST
    assert sum(outcome.fenced for outcome in outcomes) > 0
    assert sum(outcome.trimmed for outcome in outcomes) > 0
