"""What holds in every seeded world, however late its records and whichever process dies."""

import random
from collections import Counter

import msgspec
import pytest

from forgemq_contracts.run import (
    LogLayout,
    Model,
    Queue,
    RunConfiguration,
    Trainer,
    staleness_bound,
)
from forgemq_contracts.run_rules import check
from tests.simulation.scheduler_world import Faults, World

# The fast suite runs a fifth of the seeds; the full one all of them.
SEEDS = [*range(60), *(pytest.param(n, marks=pytest.mark.slow) for n in range(60, 300))]


def configuration_of(
    *, queues: list[tuple[int, int, int]], steps: int, ahead: int = 1, lanes: int = 1
) -> RunConfiguration:
    """A run with these queues (N, P, W) and deadlines of a minute or two."""
    configuration = RunConfiguration(
        run="sim",
        seed=0,
        model=Model(path="model"),
        queues=tuple(
            Queue(
                domain=f"d{number}",
                task_source="",
                agent="",
                slots=slots,
                groups_per_step=groups,
                window=window,
                group_deadline_s=60.0,
                claim_deadline_s=120.0,
            )
            for number, (slots, groups, window) in enumerate(queues)
        ),
        trainer=Trainer(steps=steps, steps_ahead_max=ahead),
        log=LogLayout(group_partitions=4, lanes=lanes),
    )
    check(configuration)
    return configuration


def assert_accounts_balance(world: World) -> None:
    """Assert G1 and G3, and that every step has P groups of every queue."""
    assert world.has_ended, f"stalled after {len(world.steps)} steps"
    assert world.admitted.keys() == world.retired.keys()
    for step in world.steps.values():
        domains = Counter(group.domain for group in step.groups)
        for queue in world.configuration.queues:
            assert domains[queue.domain] == queue.groups_per_step
            assert all(
                step.step - group.version_min <= staleness_bound(queue)
                for group in step.groups
                if group.domain == queue.domain
            )
    trained = [r.group_id for r in world.retired.values() if r.reason == "trained"]
    taken = [group.group_id for step in world.steps.values() for group in step.groups]
    assert len(set(taken)) == len(taken), "a group trains in one step only"
    assert set(trained) <= set(taken)


def shape_of(seed: int) -> RunConfiguration:
    """A run drawn from the seed: one or two queues, N from P up, W from 1 to N."""
    shape = random.Random(f"shape {seed}")
    queues = []
    for _ in range(shape.choice((1, 1, 2))):
        groups = shape.randint(1, 6)
        slots = groups * shape.randint(1, 2) + shape.randint(0, 5)
        queues.append((slots, groups, shape.randint(1, slots)))
    return configuration_of(
        queues=queues,
        steps=shape.randint(3, 12),
        ahead=shape.randint(0, 2),
        lanes=shape.randint(1, 3),
    )


@pytest.mark.simulation
@pytest.mark.parametrize("seed", SEEDS)
def test_every_group_retires_once_and_every_step_is_full_whatever_dies(seed: int) -> None:
    world = World(seed, shape_of(seed), faults=Faults(lanes=True, trainer=True))
    world.run(until_s=20_000)
    assert_accounts_balance(world)


@pytest.mark.simulation
@pytest.mark.parametrize("seed", SEEDS)
def test_without_a_trainer_restart_the_bound_holds_by_itself(seed: int) -> None:
    """No group retires as stale, so G3 does not rest on throwing stale groups away.

    The world also asserts that no token is older than its group's admission.
    """
    world = World(seed, shape_of(seed), faults=Faults(lanes=True))
    world.run(until_s=20_000)
    assert_accounts_balance(world)
    assert Counter(r.reason for r in world.retired.values())["stale"] == 0


@pytest.mark.simulation
@pytest.mark.parametrize("seed", SEEDS)
def test_the_bound_holds_while_people_add_drain_and_remove_lanes(seed: int) -> None:
    """Also with lanes that die and records that come late; the world asserts premise 5."""
    shape = shape_of(seed)
    layout = msgspec.structs.replace(shape.log, lanes_max=shape.log.lanes + 2)
    configuration = msgspec.structs.replace(shape, log=layout)
    world = World(seed, configuration, faults=Faults(lanes=True, plan=True))
    world.run(until_s=20_000)
    assert_accounts_balance(world)
    assert Counter(r.reason for r in world.retired.values())["stale"] == 0
    assert world.changes > 0


@pytest.mark.simulation
@pytest.mark.parametrize("slots", [6, 12])
def test_the_demo_never_stalls(slots: int) -> None:
    """N=12, W=4, P=6 with one step ahead, and N = P."""
    configuration = configuration_of(queues=[(slots, 6, 4)], steps=40)
    world = World(7, configuration, faults=Faults(lanes=True, trainer=True))
    world.run(until_s=20_000)
    assert_accounts_balance(world)
