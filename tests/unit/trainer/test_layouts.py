"""What the planner measures of a layout is what the joined trees have."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgemq_trainer.core.attention.path_trade import TeamPaths
from forgemq_trainer.core.attention.plan import Range
from forgemq_trainer.core.flops import flops_of_tree, forward_of
from forgemq_trainer.core.layouts import Layout, StepLayouts
from forgemq_trainer.core.low_rank import AdapterShape
from forgemq_trainer.core.memory import ModelShape
from forgemq_trainer.core.path_counts import path_counts
from forgemq_trainer.core.token_flops import token_flops
from forgemq_trainer.core.tree import Forest, joined, read_tree
from tests.unit.trainer.scene import SHAPE, adversarial_samples, agent_samples, line_of, merge
from tests.unit.trainer.team_scene import query_ranges


def _step() -> list[Forest]:
    """Five groups, two of which share a tree."""
    generator = np.random.default_rng(1)
    bush = read_tree(merge(agent_samples(generator, rollouts=4, turns=3)))
    small = read_tree(merge(adversarial_samples(generator)))
    stripped = read_tree(merge(agent_samples(generator, rollouts=3, is_stripped=True)))
    return [bush, small, line_of(40), bush, stripped]


STEP = _step()
LAYOUTS = StepLayouts(STEP, shape=SHAPE)
some_groups = st.lists(st.integers(0, len(STEP) - 1), min_size=1, max_size=5, unique=True).map(
    sorted
)


def _joined(groups: Sequence[int]) -> Forest:
    return joined([STEP[group] for group in groups])


def _blocks(layout: Layout, *, blocks: int, ranks: int) -> list[list[Range]]:
    starts = layout.cut(blocks=blocks, ranks=ranks).reshape(-1).tolist()
    ranges = list(itertools.pairwise([*starts, layout.token_count]))
    return [ranges[first : first + ranks] for first in range(0, len(ranges), ranks)]


@settings(max_examples=60, deadline=None)
@given(some_groups, st.integers(1, 6), st.integers(1, 4))
def test_blocks_have_even_tokens_and_no_range_costs_much_more_than_its_share(
    groups: list[int], count: int, ranks: int
) -> None:
    layout, forest = LAYOUTS.layout(groups), _joined(groups)
    tokens = forest.token_count
    count = min(count, tokens // ranks)
    flops = token_flops(SHAPE, forest)
    costs = flops.weights + flops.attention_N + flops.head_N
    blocks = _blocks(layout, blocks=count, ranks=ranks)
    bounds = itertools.pairwise(tokens * number // count for number in range(count + 1))
    for ranges, (start, end) in zip(blocks, bounds, strict=True):
        assert (ranges[0][0], ranges[-1][1]) == (start, end)
        assert all(first < last for first, last in ranges)
        assert ranges == list(query_ranges(costs[start:end], start=start, parts=ranks))
        share, most = costs[start:end].sum() / ranks, costs[start:end].max()
        for first, last in ranges:
            assert last - first == 1 or costs[first:last].sum() <= share + 2 * most


@pytest.mark.parametrize(
    "shape",
    [SHAPE, replace(SHAPE, adapters=AdapterShape(rank=2, targets=("q_proj",), parameters=128))],
    ids=["all weights", "adapters"],
)
def test_the_flops_of_ranges_add_up_to_those_of_their_trees(shape: ModelShape) -> None:
    groups = [0, 2, 3]
    layout = StepLayouts(STEP, shape=shape).layout(groups)
    flops = layout.range_flops(layout.cut(blocks=3, ranks=2))
    trees = [flops_of_tree(shape, STEP[group]) for group in groups]
    assert layout.flops().total == pytest.approx(sum(tree.total for tree in trees))
    assert flops.trained_KR.sum() == pytest.approx(sum(tree.total for tree in trees))
    read = sum(forward_of(tree, shape).total for tree in trees)
    assert flops.read_KR.sum() == pytest.approx(read)


@settings(max_examples=60, deadline=None)
@given(some_groups, st.integers(1, 6), st.integers(1, 4))
def test_the_counted_keys_are_those_that_the_ranks_store_and_trade(
    groups: list[int], count: int, ranks: int
) -> None:
    layout, forest = LAYOUTS.layout(groups), _joined(groups)
    count = min(count, forest.token_count // ranks)
    blocks = _blocks(layout, blocks=count, ranks=ranks)
    counts = layout.path_counts(layout.cut(blocks=count, ranks=ranks))
    plain = path_counts(forest.position_N, blocks)
    assert np.array_equal(counts.depth_KR, plain.depth_KR)
    assert np.array_equal(counts.least_KR, plain.least_KR)
    paths = [TeamPaths(forest, blocks, rank=rank) for rank in range(ranks)]
    assert counts.stored() == max(len(path.stored()) for path in paths)
    within = [[path.within(number) for number in range(count)] for path in paths]
    traded = [[_size(trade.given) + _size(trade.taken) for trade in each] for each in within]
    assert counts.traded() == max(map(max, traded))
    for is_trained in (False, True):
        keys, gradients = counts.handed_over(is_trained=is_trained)
        for rank, path in enumerate(paths):
            forward = [*within[rank], *(path.before(number) for number in range(1, count))]
            back = [path.back(number) for number in range(count - 1)] if is_trained else []
            assert keys[rank] == sum(_size(trade.given) for trade in (*forward, *back))
            owed = sum(_size(trade.taken) for trade in forward)
            assert gradients[rank] == (owed if is_trained else 0)


def _size(tokens: Sequence[np.ndarray]) -> int:
    return sum(map(len, tokens))
