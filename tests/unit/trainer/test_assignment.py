"""Whole groups go to ranks by cost; only a group that is too large is split."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgemq_trainer.core.assignment import (
    OwnRound,
    SharedRound,
    balanced,
    plan_rounds,
    query_ranges,
)
from forgemq_trainer.core.flops import multiplications
from forgemq_trainer.core.tree import read_tree
from tests.unit.trainer.scene import SHAPE, agent_samples, line_of, make_sample, merge


def _budget(*, tokens: int, carried: int) -> int:
    needed = SHAPE.block_bytes(tokens, chunk=8, is_carried=False)
    return needed + carried * SHAPE.carry_bytes_per_token


def test_the_costliest_groups_go_first_each_to_the_rank_with_the_least() -> None:
    assert balanced([0, 1, 2], costs={0: 5, 1: 4, 2: 3}, world_size=2) == ((0,), (1, 2))


def test_every_group_runs_once_and_loads_are_even() -> None:
    generator = np.random.default_rng(0)
    forests = [
        read_tree(merge(agent_samples(generator, rollouts=int(n)), f"g-{i}"))
        for i, n in enumerate(generator.integers(1, 6, 24))
    ]
    rounds = plan_rounds(
        forests,
        shape=SHAPE,
        world_size=3,
        budget_bytes=_budget(tokens=400, carried=0),
        head_chunk=8,
    )
    loads, seen = [0, 0, 0], []
    for planned in rounds:
        assert isinstance(planned, OwnRound)
        for rank, microbatch in enumerate(planned.microbatch_of_rank):
            for group in () if microbatch is None else microbatch.groups:
                forest = forests[group]
                seen.append(group)
                loads[rank] += multiplications(
                    SHAPE, tokens=forest.token_count, attention_pairs=forest.attention_pairs
                )
    assert sorted(seen) == list(range(24))
    assert max(loads) / min(loads) < 1.05


@pytest.mark.parametrize("world_size", [2, 3])
def test_only_a_group_over_the_budget_is_split_and_its_parts_fit(world_size: int) -> None:
    forests = [line_of(60), line_of(500), line_of(50)]
    budget = _budget(tokens=150, carried=500)
    rounds = plan_rounds(
        forests, shape=SHAPE, world_size=world_size, budget_bytes=budget, head_chunk=8
    )
    shared = [planned for planned in rounds if isinstance(planned, SharedRound)]
    own = [planned for planned in rounds if isinstance(planned, OwnRound)]
    groups = [
        group
        for planned in own
        for microbatch in planned.microbatch_of_rank
        if microbatch is not None
        for group in microbatch.groups
    ]
    capacity = SHAPE.block_tokens(
        budget - 500 * SHAPE.carry_bytes_per_token, chunk=8, is_carried=True
    )
    if capacity >= 500:
        pytest.fail("the budget of this test holds the whole group")
    assert sorted(groups) == [0, 2]
    (split,) = shared
    assert split.group == 1
    ranges = list(itertools.chain(*split.blocks))
    assert [start for start, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
    assert ranges[-1][1] == 500
    assert all(len(block) == world_size for block in split.blocks)
    assert all(0 < end - start <= capacity for start, end in ranges)


def test_no_rank_runs_a_group_without_entries() -> None:
    generator = np.random.default_rng(0)
    empty = read_tree(merge([make_sample([1, 2, 3], [], generator)], "g-0"))
    rounds = plan_rounds([empty], shape=SHAPE, world_size=2, budget_bytes=10**9, head_chunk=8)
    assert rounds == ()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=4, max_size=60), st.integers(1, 4))
def test_query_ranges_cover_all_and_none_costs_a_token_more_than_its_share(
    costs: list[int], parts: int
) -> None:
    ranges = query_ranges(np.array(costs), start=10, parts=parts)
    assert ranges[0][0] == 10
    assert ranges[-1][1] == 10 + len(costs)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    assert all(start < end for start, end in ranges)
    share = sum(costs) / parts
    for start, end in ranges:
        assert end - start == 1 or sum(costs[start - 10 : end - 10]) <= share + 2 * max(costs)
