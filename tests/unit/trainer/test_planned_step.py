"""What a step is planned to cost, against the formulas of its parts."""

from dataclasses import replace

import pytest

from forgemq_trainer.core.assignment import plan_rounds
from forgemq_trainer.core.flops import flops_of_tree, layer_weights
from forgemq_trainer.core.low_rank import AdapterShape
from forgemq_trainer.core.planned_step import Ranks, planned_group, planned_step
from forgemq_trainer.core.traffic import GatheredValues, RankGrid
from forgemq_trainer.core.tree import Forest
from tests.unit.trainer.scene import SHAPE, line_of

TREES = (line_of(1000), line_of(700), line_of(700))


VALUES = GatheredValues(layers=6000, root=300, head=200, trained=6500)


def _ranks(ranks: int, *, tokens: int, replicas: int = 1, room_bytes: int = 0) -> Ranks:
    return Ranks(
        grid=RankGrid(shards=ranks // replicas, replicas=replicas),
        values=VALUES,
        budget_bytes=SHAPE.block_bytes(tokens, chunk=8, is_carried=False) + room_bytes,
        head_chunk=8,
    )


def _flops(*trees: Forest) -> float:
    return sum(flops_of_tree(SHAPE, tree).total for tree in trees)


def test_a_step_that_fits_goes_once_forward_and_backward():
    step = planned_step(TREES, shape=SHAPE, ranks=_ranks(1, tokens=2400))
    assert (step.forwards, step.backwards, step.exchanged_bytes) == (1, 1, 0)
    assert step.whole_tokens == 2400
    assert step.flops == step.slowest_flops == pytest.approx(_flops(*TREES))


def test_ranks_wait_for_the_one_with_the_costliest_groups():
    trees = (TREES[0], line_of(980))
    step = planned_step(trees, shape=SHAPE, ranks=_ranks(2, tokens=2400))
    assert step.slowest_flops == pytest.approx(_flops(trees[0]))
    assert step.flops == pytest.approx(_flops(*trees))
    assert step.idle_share == pytest.approx(1 - _flops(*trees) / (2 * _flops(trees[0])))


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


def test_ranks_of_a_team_get_the_keys_before_their_queries_and_the_gradients_of_their_own():
    ranks = _ranks(2, tokens=500)
    step = planned_step(TREES[:1], shape=SHAPE, ranks=ranks)
    assert (step.forwards, step.backwards) == (4, 2)
    (planned,) = plan_rounds(
        TREES[:1], shape=SHAPE, world_size=2, budget_bytes=ranks.budget_bytes, head_chunk=8
    )
    # The tree is one path. All keys but those of the last range go to the other rank once, and
    # their gradients come back. Keys and values of 2 layers in float32.
    handed_over = planned.teams[0].blocks[-1][-1][0]
    assert 500 < handed_over < 1000
    keys = handed_over * 2 * 2 * SHAPE.key_size * 4
    # Each also sends half of the entries' two values, twice.
    assert step.exchanged_bytes == keys + 2 * 4 * TREES[0].entry_count
    cost = flops_of_tree(SHAPE, TREES[0])
    again = cost.weights / 3 + cost.attention * 2 / 7 + cost.head / 4
    assert step.slowest_flops == pytest.approx((cost.total + again) / 2, rel=0.01)
    assert 0 < step.idle_share < 0.01
    group = planned_group(TREES[0], shape=SHAPE, ranks=ranks)
    assert (group.way, group.ranks, group.blocks) == ("shared", 2, 2)
    assert group.predicted_bytes <= ranks.budget_bytes


def test_replicas_gather_less_and_sum_their_shards_once():
    """Two rounds, between which weights and gradients are kept."""
    whole = planned_step(TREES * 2, shape=SHAPE, ranks=_ranks(4, tokens=1000))
    halves = planned_step(TREES * 2, shape=SHAPE, ranks=_ranks(4, tokens=1000, replicas=2))
    assert (whole.forwards, whole.kept, halves.kept) == (2, "gradients", "gradients")
    gathered = 4 * 6500
    assert (whole.gathered_bytes, halves.gathered_bytes) == (gathered * 3 // 4, gathered // 2)
    assert (whole.reduced_bytes, halves.reduced_bytes) == (4 * 6500 * 3 // 4, 4 * 6500 // 2)
    assert (whole.replicated_bytes, halves.replicated_bytes) == (0, 4 * 6500 // 2)


@pytest.mark.parametrize(
    ("room_bytes", "kept", "gathers", "reductions"),
    [
        (4 * 200 - 1, "nothing", (4, 2, 2), 2),
        (4 * 200, "head", (4, 2, 1), 2),
        (4 * 6500, "weights", (1, 1, 1), 2),
        (8 * 6500, "gradients", (1, 1, 1), 1),
    ],
)
def test_what_the_budget_has_room_for_is_kept_between_passes(
    room_bytes: int, kept: str, gathers: tuple[int, int, int], reductions: int
):
    """Two trees of 1000 tokens on each rank, of which one fits at once."""
    trees, ranks = TREES[:1] * 4, _ranks(2, tokens=1000, room_bytes=room_bytes)
    step = planned_step(trees, shape=SHAPE, ranks=ranks)
    assert (step.kept, step.forwards, step.backwards) == (kept, 2, 2)
    values = (VALUES.layers, VALUES.root, VALUES.head)
    gathered = sum(count * each for count, each in zip(gathers, values, strict=True))
    assert step.gathered_bytes == 4 * gathered // 2
    assert step.reduced_bytes == reductions * 4 * VALUES.total // 2


def test_tokens_travel_in_forward_in_backward_and_again_from_recomputed_layers():
    shape = replace(SHAPE, experts=8, experts_per_token=2, expert_ranks=2)
    row = shape.hidden * shape.value_bytes
    roomy = replace(_ranks(2, tokens=1), budget_bytes=10**9)
    usual = planned_step([TREES[0], line_of(980)], shape=shape, ranks=roomy)
    # 1000 tokens on the rank with most; 2 layers, 2 rows of a token, there and back in two passes,
    # of which half leaves the rank.
    assert usual.travelled_bytes == 1000 * row * 2 * 2 * (2 * 2) // 2
    budget = shape.block_bytes(1000, chunk=8, is_carried=False, recomputed_layers=1)
    tight = replace(roomy, budget_bytes=budget)
    again = planned_step(TREES[:1] * 2, shape=shape, ranks=tight)
    assert again.travelled_bytes == 1000 * row * 2 * (2 * (2 * 2) + 2) // 2
    # One group is cut in two ranges of even cost, the first of more tokens.
    (team,) = plan_rounds(TREES[:1], shape=shape, world_size=2, budget_bytes=10**9, head_chunk=8)[
        0
    ].teams
    (((_, longest), _),) = team.blocks
    assert 500 < longest < 1000
    alone = planned_step(TREES[:1], shape=shape, ranks=roomy)
    assert alone.travelled_bytes == longest * row * 2 * 2 * (2 * 2) // 2


def test_of_experts_on_several_ranks_a_share_is_gathered_by_the_ranks_that_hold_it():
    values = replace(
        VALUES, layers=2000, trained=2500, experts=1000, trained_experts=1000, holders=2
    )
    ranks = replace(_ranks(4, tokens=1000), values=values)
    step = planned_step(TREES[:1] * 8, shape=SHAPE, ranks=ranks)
    assert (step.forwards, step.backwards, step.kept) == (2, 2, "nothing")
    whole = 4 * (4 * 2000 + 2 * 300 + 2 * 200)
    assert step.gathered_bytes == whole * 3 // 4 + 4 * 4 * 1000 // 2
    assert step.reduced_bytes == 2 * 4 * 2500 * 3 // 4 + 2 * 4 * 1000 // 2


def test_a_group_without_a_plan_says_why():
    group = planned_group(TREES[0], shape=SHAPE, ranks=_ranks(2, tokens=70))
    assert group.way == "none"
    assert "a tree of 1000 tokens with a longest path of 1000 needs at most" in group.refusal
