"""What a step is planned to cost, against the formulas of its parts."""

from dataclasses import replace

import pytest

from forgemq_trainer.core.flops import flops_of_tree, layer_weights
from forgemq_trainer.core.low_rank import AdapterShape
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


def test_recomputed_layers_run_their_products_again():
    group = planned_group(TREES[0], shape=SHAPE, ranks=_ranks(1, tokens=900))
    assert (group.way, group.blocks, group.recomputed_layers) == ("whole", 1, 1)
    step = planned_step(TREES[:1], shape=SHAPE, ranks=_ranks(1, tokens=900))
    assert (step.forwards, step.backwards) == (1, 1)
    cost = flops_of_tree(SHAPE, TREES[0])
    # One of two layers; its attention's output is kept, and the head runs once.
    assert step.slowest_flops == pytest.approx(cost.total + cost.weights / 3 / 2)


def test_blocks_add_a_forward():
    alone = planned_group(TREES[0], shape=SHAPE, ranks=_ranks(1, tokens=500))
    assert (alone.way, alone.blocks) == ("blocks", 3)
    step = planned_step(TREES[:1], shape=SHAPE, ranks=_ranks(1, tokens=500))
    assert (step.forwards, step.backwards) == (6, 3)
    cost = flops_of_tree(SHAPE, TREES[0])
    again = cost.weights / 3 + cost.attention * 2 / 7 + cost.head / 4
    assert step.slowest_flops == pytest.approx(cost.total + again)


def test_a_frozen_models_second_forward_is_half_of_its_products_and_a_third_of_its_adapters():
    adapters = AdapterShape(rank=2, targets=("q_proj",), parameters=128)
    shape = replace(SHAPE, adapters=adapters)
    step = planned_step(TREES[:1], shape=shape, ranks=_ranks(1, tokens=500))
    assert (step.forwards, step.backwards) == (6, 3)
    cost, tokens = flops_of_tree(shape, TREES[0]), TREES[0].token_count
    again = 2 * (layer_weights(shape) + 2 * 128) * tokens + cost.attention * 2 / 7 + cost.head / 3
    assert step.slowest_flops == pytest.approx(cost.total + again)


def test_shared_groups_exchange_keys_in_each_forward_and_sum_their_gradients():
    step = planned_step(TREES[:1], shape=SHAPE, ranks=_ranks(2, tokens=500))
    assert (step.forwards, step.backwards) == (4, 2)
    # Keys and values of 2 layers in float32.
    assert step.exchanged_bytes == 1000 * 2 * 2 * SHAPE.key_size * (2 * 4 + 4)
    cost = flops_of_tree(SHAPE, TREES[0])
    again = cost.weights / 3 + cost.attention * 2 / 7 + cost.head / 4
    assert step.slowest_flops == pytest.approx((cost.total + again) / 2)


def test_a_group_without_a_plan_says_why():
    group = planned_group(TREES[0], shape=SHAPE, ranks=_ranks(2, tokens=70))
    assert group.way == "none"
    assert "bytes too small for a tree of 1000 tokens" in group.refusal
