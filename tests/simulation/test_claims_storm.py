"""Gateways, scheduler and reward core in a storm with agents that vanish, hang and come late.

A schedule is a whole run and costs a third of a second, so the fast suite runs two of them.
"""

import gc

import pytest

from tests.simulation.storm.claims import run_claims_seed

SEEDS = 160
SEEDS_A_TEST = 20
FIRST_SEEDS = [
    pytest.param(first, marks=pytest.mark.long if 2 * first >= SEEDS else pytest.mark.slow)
    for first in range(0, SEEDS, SEEDS_A_TEST)
]

pytestmark = pytest.mark.simulation


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_every_group_of_a_run_ends_once_whatever_its_agents_and_gateways_do(seed):
    assert run_claims_seed(seed).trained > 0


@pytest.mark.slow
def test_a_seed_of_claims_is_the_same_schedule_whenever_memory_is_collected():
    gc.disable()
    try:
        uncollected = run_claims_seed(1)
    finally:
        gc.enable()
    thresholds = gc.get_threshold()
    gc.set_threshold(50, 2, 2)
    try:
        assert run_claims_seed(1) == uncollected
    finally:
        gc.set_threshold(*thresholds)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first_seed", FIRST_SEEDS)
def test_a_storm_of_claims_leaves_no_group_without_its_one_end(first_seed):
    outcomes = [run_claims_seed(seed) for seed in range(first_seed, first_seed + SEEDS_A_TEST)]
    assert sum(outcome.attempts - outcome.episodes for outcome in outcomes) > 0
    assert sum(outcome.closed for outcome in outcomes) > 0
    assert sum(outcome.unclaimed for outcome in outcomes) > 0
    assert sum(outcome.truncated for outcome in outcomes) > SEEDS_A_TEST
    assert sum(outcome.left for outcome in outcomes) > 0
    assert sum(outcome.deaths for outcome in outcomes) > SEEDS_A_TEST
    assert sum(outcome.trimmed for outcome in outcomes) > 0
