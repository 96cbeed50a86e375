"""Teams of ranks: every entry is trained once, budgets are kept, and ranks hardly wait."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_workloads import SHAPES, merged_tree, requests

from forgemq_trainer.core.assignment import (
    Round,
    balanced,
    idle_share,
    plan_rounds,
    team_ranks,
)
from forgemq_trainer.core.flops import flops_of_tree, forward_of
from forgemq_trainer.core.memory import BLOCK_TOKENS_MIN, ModelShape, least_budget_bytes
from forgemq_trainer.core.team_plans import Team, TeamPlans
from forgemq_trainer.core.tree import Forest, read_tree
from tests.unit.trainer.scene import SHAPE, agent_samples, line_of, make_sample, merge

SPREAD = replace(SHAPE, experts=8, experts_per_token=2, expert_ranks=2)
"""Tokens travel to experts on other ranks."""


def _plan(
    forests: Sequence[Forest], *, world_size: int, budget_bytes: int, shape: ModelShape = SHAPE
) -> tuple[Round, ...]:
    return plan_rounds(
        forests, shape=shape, world_size=world_size, budget_bytes=budget_bytes, head_chunk=8
    )


def _whole_bytes(tokens: int, *, recomputed_layers: int = 0, shape: ModelShape = SHAPE) -> int:
    return shape.block_bytes(tokens, chunk=8, is_carried=False, recomputed_layers=recomputed_layers)


def _teams(rounds: Sequence[Round]) -> list[list[tuple[tuple[int, int], tuple[int, ...]]]]:
    return [[(team.ranks, team.groups) for team in each.teams] for each in rounds]


@cache
def _bush(rollouts: int, *, turns: int = 4, seed: int = 0) -> Forest:
    generator = np.random.default_rng(seed)
    samples = agent_samples(generator, rollouts=rollouts, turns=turns, prompt=40, act=10)
    return read_tree(merge(samples, f"g-{rollouts}-{seed}"))


def test_the_costliest_groups_go_first_each_to_the_part_that_is_the_least_full() -> None:
    costs = {0: 5.0, 1: 4.0, 2: 3.0}
    assert balanced([0, 1, 2], costs=costs, shares=[1, 1]) == ((0,), (1, 2))
    assert balanced([0, 1, 2], costs=costs, shares=[1, 3]) == ((2,), (0, 1))


def test_teams_are_all_ranks_their_halves_and_the_halves_of_those() -> None:
    assert list(team_ranks(1)) == []
    assert list(team_ranks(3)) == [(0, 3), (1, 3)]
    assert list(team_ranks(4)) == [(0, 4), (0, 2), (2, 4)]


def test_groups_of_even_cost_take_a_rank_each_and_a_long_one_takes_a_team_beside_them() -> None:
    even = [_bush(6, seed=seed) for seed in (1, 1, 1, 1)]
    (side_by_side,) = _teams(_plan(even, world_size=4, budget_bytes=10**9))
    assert [ranks for ranks, _ in side_by_side] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert sorted(groups for _, groups in side_by_side) == [(0,), (1,), (2,), (3,)]
    long = [_bush(6, seed=1), _bush(13, seed=1), _bush(6, seed=1)]
    assert _teams(_plan(long, world_size=4, budget_bytes=10**9)) == [
        [((0, 2), (1,)), ((2, 3), (0,)), ((3, 4), (2,))]
    ]


def test_teams_to_whose_experts_tokens_travel_run_beside_each_other_if_all_have_room() -> None:
    """The ranks of a short group need room for the rows of a long one's tokens."""
    forests = [_bush(6, seed=1), _bush(13, seed=1), _bush(6, seed=1)]
    apart = [[((0, 2), (1,)), ((2, 3), (0,)), ((3, 4), (2,))]]
    (planned,) = _plan(forests, world_size=4, budget_bytes=10**9, shape=SPREAD)
    assert _teams([planned]) == apart
    alone = TeamPlans(forests, shape=SPREAD, budget_bytes=10**9, head_chunk=8)
    first, second, _ = planned.teams
    own = [alone.team(team.ranks, team.groups, count=1) for team in (first, second)]
    assert second.longest < first.longest
    assert [first.predicted_bytes] == [team.predicted_bytes for team in own[:1] if team]
    longest = _whole_bytes(first.longest, shape=SPREAD)
    assert second.predicted_bytes == longest > _whole_bytes(second.longest, shape=SPREAD)
    most = max(team.predicted_bytes for team in planned.teams)
    assert _teams(_plan(forests, world_size=4, budget_bytes=most, shape=SPREAD)) == apart
    tight = _plan(forests, world_size=4, budget_bytes=most - 1, shape=SPREAD)
    assert all(team.predicted_bytes < most for each in tight for team in each.teams)


def test_a_group_that_fits_a_rank_only_recomputed_is_kept_by_a_team_if_it_is_alone() -> None:
    forest = _bush(8)
    budget = _whole_bytes(forest.token_count) - 1
    (alone,) = _plan([forest] * 2, world_size=2, budget_bytes=budget)
    assert [team.recomputed_layers for team in alone.teams] == [1, 1]
    (planned,) = _plan([forest], world_size=2, budget_bytes=budget)
    (team,) = planned.teams
    assert (team.ranks, team.recomputed_layers, len(team.blocks)) == ((0, 2), 0, 1)


def test_ranks_to_whose_experts_tokens_travel_recompute_as_many_layers_as_the_one_with_most() -> (
    None
):
    forests = [_bush(8), _bush(4)]
    budget = _whole_bytes(forests[0].token_count, shape=SPREAD) - 1
    plans = TeamPlans(forests, shape=SPREAD, budget_bytes=budget, head_chunk=8)
    found = [plans.team((rank, rank + 1), (rank,), count=1) for rank in (0, 1)]
    teams = [team for team in found if team is not None]
    assert [team.recomputed_layers for team in teams] == [1, 0]
    first, second = plans.recomputing_alike(teams)
    assert first == teams[0]
    assert (second.ranks, second.groups, second.recomputed_layers) == ((1, 2), (1,), 1)
    once = flops_of_tree(SPREAD, forests[1])
    again = forward_of(once, SPREAD).weights / SPREAD.layers
    assert second.flops == ((pytest.approx(once.total + again),),)


def test_no_rank_runs_a_group_without_entries() -> None:
    generator = np.random.default_rng(0)
    empty = read_tree(merge([make_sample([1, 2, 3], [], generator)], "g-0"))
    assert _plan([empty], world_size=2, budget_bytes=10**9) == ()


def test_a_budget_below_the_least_is_refused_with_what_the_tree_needs() -> None:
    forests = [line_of(100), line_of(1000)]
    least = least_budget_bytes(SHAPE, longest_path=1000, head_chunk=8)
    rounds = _plan(forests, world_size=2, budget_bytes=least)
    assert 2 <= rounds[-1].block_count <= 16
    with pytest.raises(ValueError, match=f"tree of 1000 tokens .* needs at most {least}; raise"):
        _plan(forests, world_size=2, budget_bytes=least // 2)


def _check_covered(team: Team, forests: Sequence[Forest]) -> None:
    ranges = list(itertools.chain(*team.blocks))
    assert [start for start, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
    assert ranges[-1][1] == sum(forests[group].token_count for group in team.groups)
    assert all(start < end for start, end in ranges)
    assert all(len(block) == team.size for block in team.blocks)


def _check_spread(planned: Round, forests: Sequence[Forest], *, budget_bytes: int) -> None:
    """Every rank may compute experts for as many tokens as the one with most has."""
    layers = planned.recomputed_layers
    assert all(team.recomputed_layers == layers for team in planned.teams)
    assert layers == 0 or all(team.is_whole for team in planned.teams)
    tokens = max(team.longest for team in planned.teams)
    held = _whole_bytes(tokens, recomputed_layers=layers, shape=SPREAD)
    assert held <= budget_bytes
    carried = SPREAD.block_bytes(tokens, chunk=8, is_carried=True)
    for team in planned.teams:
        assert team.is_whole or carried <= team.predicted_bytes


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=7),
    world_size=st.integers(1, 6),
    room=st.floats(0, 1),
    shape=st.sampled_from([SHAPE, SPREAD]),
)
def test_every_group_trains_once_within_the_budget_and_all_ranks_gather_equally_often(
    sizes: list[tuple[int, int]], world_size: int, room: float, shape: ModelShape
) -> None:
    forests = [_bush(rollouts, turns=turns) for rollouts, turns in sizes]
    longest = max(int(forest.position_N.max()) + 1 for forest in forests)
    least = least_budget_bytes(shape, longest_path=longest, head_chunk=8)
    most = _whole_bytes(sum(forest.token_count for forest in forests), shape=shape)
    budget = int(least + room**2 * max(0, most - least))
    rounds = _plan(forests, world_size=world_size, budget_bytes=budget, shape=shape)
    assert rounds == _plan(forests, world_size=world_size, budget_bytes=budget, shape=shape)
    teams = [team for each in rounds for team in each.teams]
    assert sorted(itertools.chain(*(team.groups for team in teams))) == list(range(len(forests)))
    for each in rounds:
        ranks = [rank for team in each.teams for rank in range(*team.ranks)]
        assert len(set(ranks)) == len(ranks) <= world_size
        # Passes are what gathers: one, or a forward and a training pass for each block.
        count = each.block_count
        passes = 1 if count == 1 else 2 * count
        assert [(len(team.blocks), len(team.flops)) for team in each.teams] == [
            (count, passes)
        ] * len(each.teams)
        if shape is SPREAD and len(each.teams) > 1:
            _check_spread(each, forests, budget_bytes=budget)
    for team in teams:
        _check_covered(team, forests)
        assert team.predicted_bytes <= budget
        assert team.size == 1 or team.ranks in team_ranks(world_size)
        if team.size > 1:
            mean = sum(forests[group].token_count for group in team.groups)
            assert mean / (team.size * len(team.blocks)) > BLOCK_TOKENS_MIN / 2
        trained = sum(sum(flops) for flops in team.flops[-len(team.blocks) :])
        once = sum(flops_of_tree(shape, forests[group]).total for group in team.groups)
        recomputed = team.recomputed_layers > 0
        assert recomputed or trained == pytest.approx(once)
        assert not recomputed or once < trained < 1.34 * once


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_ranks_wait_for_at_most_a_tenth_of_a_step_over_the_workloads(world_size: int) -> None:
    trees = {
        name: read_tree(merged_tree(requests(SHAPES[name]))) for name in ("A", "D", "F", "headline")
    }
    steps = [*([tree] for tree in trees.values()), list(trees.values())]
    for room in (10**9, _whole_bytes(9000), _whole_bytes(3000)):
        for step in steps:
            rounds = _plan(step, world_size=world_size, budget_bytes=room)
            assert idle_share(rounds, world_size=world_size) <= 0.1


def test_the_idle_share_counts_ranks_that_wait_in_a_pass_and_those_without_a_team() -> None:
    def team(ranks: tuple[int, int], *flops: tuple[float, ...]) -> Team:
        blocks = ((((0, 1),) * (ranks[1] - ranks[0])),)
        return Team(ranks=ranks, groups=(), blocks=blocks, predicted_bytes=0, flops=flops)

    both = Round(teams=(team((0, 1), (3.0,)), team((1, 3), (4.0, 2.0))))
    assert both.slowest == (4.0,)
    assert idle_share([both], world_size=4) == pytest.approx(1 - 9 / 16)
    assert idle_share([], world_size=4) == 0
