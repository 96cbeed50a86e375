"""What a step is planned to cost, against the formulas of its parts."""

import pytest

from forgemq_trainer.core.flops import flops_of_tree
from forgemq_trainer.core.planned_step import Ranks, planned_group, planned_step
from forgemq_trainer.core.tree import Forest
from tests.unit.trainer.scene import SHAPE, line_of

TREES = (line_of(1000), line_of(700), line_of(700))


def _ranks(world_size: int, *, tokens: int) -> Ranks:
    budget = SHAPE.block_bytes(tokens, chunk=8, is_carried=False)
    return Ranks(world_size=world_size, budget_bytes=budget, head_chunk=8)


def _flops(*trees: Forest) -> float:
    return sum(flops_of_tree(SHAPE, tree).total for tree in trees)


def test_a_step_that_fits_goes_once_forward_and_backward():
    step = planned_step(TREES, shape=SHAPE, ranks=_ranks(1, tokens=2400))
    assert (step.forwards, step.backwards, step.exchanged_bytes) == (1, 1, 0)
    assert step.whole_tokens == 2400
    assert step.flops == step.slowest_flops == pytest.approx(_flops(*TREES))


def test_ranks_wait_for_the_one_with_the_costliest_groups():
    step = planned_step(TREES, shape=SHAPE, ranks=_ranks(2, tokens=2400))
    assert step.slowest_flops == pytest.approx(_flops(TREES[1], TREES[2]))
    assert step.flops == pytest.approx(_flops(*TREES))


def test_blocks_add_a_forward_and_shared_groups_an_exchange():
    alone = planned_group(TREES[0], shape=SHAPE, ranks=_ranks(1, tokens=900))
    assert (alone.way, alone.blocks) == ("blocks", 2)
    together = planned_step(TREES[:1], shape=SHAPE, ranks=_ranks(2, tokens=900))
    assert (together.forwards, together.backwards) == (1, 1)
    assert together.slowest_flops == pytest.approx(_flops(TREES[0]) / 2)
    # Keys and values of 2 layers in float32: gathered in each forward, their gradients summed.
    assert together.exchanged_bytes == 1000 * 2 * 2 * SHAPE.key_size * (4 + 4)
    tight = planned_step(TREES[:1], shape=SHAPE, ranks=_ranks(2, tokens=500))
    assert tight.forwards == 2 * tight.backwards > 2
    assert tight.exchanged_bytes == 1000 * 2 * 2 * SHAPE.key_size * (2 * 4 + 4)
    cost = flops_of_tree(SHAPE, TREES[0])
    in_blocks = planned_step(TREES[:1], shape=SHAPE, ranks=_ranks(1, tokens=900))
    assert (in_blocks.forwards, in_blocks.backwards) == (4, 2)
    again = cost.weights / 3 + cost.attention * 2 / 7 + cost.head / 4
    assert in_blocks.slowest_flops == pytest.approx(cost.total + again)


def test_a_group_without_a_plan_says_why():
    group = planned_group(TREES[0], shape=SHAPE, ranks=_ranks(2, tokens=70))
    assert group.way == "none"
    assert "bytes too small for a tree of 1000 tokens" in group.refusal
