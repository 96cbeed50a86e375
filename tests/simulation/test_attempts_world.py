"""Every turn ends once, whatever lanes, log and clients do."""

import pytest

from tests.simulation.attempts_world import World


@pytest.mark.simulation
@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(n, marks=pytest.mark.slow) for n in range(20, 200))]
)
def test_every_waiting_client_hears_once_and_no_result_is_lost(seed: int) -> None:
    world = World(seed, lanes=1 + seed % 3)
    world.run(until_s=60)
    world.calendar.has_faults = False
    world.run(until_s=100)
    assert world.answers > 20, "clients are served again once nothing fails"


@pytest.mark.slow
@pytest.mark.simulation
def test_the_worlds_together_reach_every_way_a_turn_can_end() -> None:
    worlds = [World(seed, lanes=2) for seed in range(10)]
    for world in worlds:
        world.run(until_s=90)
    assert sum(world.answers for world in worlds) > 500
    assert sum(world.refusals for world in worlds) > 50
    assert sum(world.moves for world in worlds) > 50
    assert sum(len(world.cancelled_log) for world in worlds) > 50
    assert sum(len(world.retired) for world in worlds) > 5
    assert sum(world.circuits for world in worlds) > 1


@pytest.mark.simulation
@pytest.mark.parametrize("seed", range(20))
def test_without_faults_every_request_is_answered_by_its_first_attempt(seed: int) -> None:
    world = World(seed, lanes=2, has_faults=False)
    world.run(until_s=60)
    assert world.answers > 20
    assert (world.moves, len(world.cancelled_log)) == (0, 0)
