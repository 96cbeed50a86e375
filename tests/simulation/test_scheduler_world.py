"""What holds in every seeded world, however late its records and whichever process dies."""

import random
from collections import Counter

import msgspec
import pytest

from forgemq_contracts.mixture import mixture_of, staleness_bounds
from forgemq_contracts.run import (
    LogLayout,
    Model,
    Queue,
    RunConfiguration,
    Trainer,
)
from forgemq_contracts.run_rules import check
from forgemq_contracts.stages import Stage, StageDomain, stage_at
from tests.simulation.scheduler_world import Faults, World

# The fast suite runs a few of the seeds, the full one a quarter; `make test-long` runs all others.
SEEDS = [
    *range(12),
    *(pytest.param(n, marks=pytest.mark.slow) for n in range(12, 48)),
    *(pytest.param(n, marks=pytest.mark.long) for n in range(48, 200)),
]


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
    """Assert G1 and G3, and that every step has its groups of every queue."""
    bounds = staleness_bounds(world.configuration)
    assert world.has_ended, f"stalled after {len(world.steps)} steps"
    assert world.admitted.keys() == world.retired.keys()
    for step in world.steps.values():
        domains = Counter(group.domain for group in step.groups)
        wanted = mixture_of(world.configuration).groups(step.step)
        for queue, groups in zip(world.configuration.queues, wanted, strict=True):
            assert domains[queue.domain] == groups
            assert all(
                step.step - group.version_min <= bounds[queue.domain]
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


SHARES = [
    (0.334, 0.333, 0.333),
    (0.5, 0.3, 0.2),
    (0.8, 0.2, 0.0),
    (0.0, 0.45, 0.55),
    (1.0, 0.0, 0.0),
    (0.25, 0.0, 0.75),
]


def staged_shape_of(seed: int) -> RunConfiguration:
    """A run of three queues and two to four stages, of which some leave a queue out."""
    shape = random.Random(f"stages {seed}")
    groups = [shape.randint(1, 3) for _ in range(3)]
    queues = []
    for number in groups:
        slots = shape.randint(sum(groups), 2 * sum(groups) + 3)
        queues.append((slots, number, shape.randint(1, slots)))
    mixed = [*shape.choices(SHARES[1:], k=shape.randint(1, 3)), SHARES[0]]
    shape.shuffle(mixed)
    starts = sorted((0, *shape.sample(range(1, 12), len(mixed) - 1)))
    configuration = msgspec.structs.replace(
        configuration_of(
            queues=queues,
            steps=starts[-1] + shape.randint(2, 6),
            ahead=shape.randint(0, 2),
            lanes=shape.randint(1, 3),
        ),
        stages=tuple(
            Stage(
                from_step=start,
                domains=tuple(
                    StageDomain(domain=f"d{number}", share=share)
                    for number, share in enumerate(shares)
                ),
            )
            for start, shares in zip(starts, mixed, strict=True)
        ),
    )
    check(configuration)
    return configuration


@pytest.mark.slow
@pytest.mark.simulation
@pytest.mark.parametrize("seed", SEEDS)
def test_stages_are_mixed_exactly_and_no_token_passes_the_bound(seed: int) -> None:
    """Also across stages, and over those that leave a domain out; no group is wasted as stale."""
    world = World(seed, staged_shape_of(seed), faults=Faults(lanes=True))
    world.run(until_s=40_000)
    assert_accounts_balance(world)
    assert Counter(r.reason for r in world.retired.values())["stale"] == 0
    for step in world.steps.values():
        assert step.stage == stage_at(world.configuration.stages, step.step)


@pytest.mark.slow
@pytest.mark.simulation
@pytest.mark.parametrize("seed", SEEDS)
def test_stages_are_mixed_exactly_while_the_trainer_restarts(seed: int) -> None:
    world = World(seed, staged_shape_of(seed), faults=Faults(lanes=True, trainer=True))
    world.run(until_s=40_000)
    assert_accounts_balance(world)


@pytest.mark.simulation
@pytest.mark.parametrize("slots", [6, 12])
def test_the_demo_never_stalls(slots: int) -> None:
    """N=12, W=4, P=6 with one step ahead, and N = P."""
    configuration = configuration_of(queues=[(slots, 6, 4)], steps=40)
    world = World(7, configuration, faults=Faults(lanes=True, trainer=True))
    world.run(until_s=20_000)
    assert_accounts_balance(world)
