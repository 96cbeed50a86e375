"""The FLOPs that are planned for a draft head are those of the products that it computes."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from forgemq_trainer.core.attention.carry import LayoutRun
from forgemq_trainer.core.draft_flops import draft_flops
from forgemq_trainer.core.draft_memory import DraftShape
from forgemq_trainer.core.drafting import Drafting, with_lone_roots
from forgemq_trainer.core.layouts import StepLayouts
from forgemq_trainer.core.planned_step import Ranks, planned_step
from forgemq_trainer.core.traffic import GatheredValues, RankGrid
from forgemq_trainer.core.tree import Forest, read_tree
from forgemq_trainer.draft_head import LoadedHead, with_draft_head
from forgemq_trainer.model import prepare
from tests.unit.trainer.head_scene import save_head
from tests.unit.trainer.scene import (
    SHAPE,
    adversarial_samples,
    agent_samples,
    line_of,
    make_model,
    merge,
)


def _forest() -> Forest:
    return read_tree(merge(agent_samples(np.random.default_rng(0), rollouts=4, turns=3), "g"))


def _products(head: LoadedHead, forest: Forest, blocks: int) -> int:
    """FLOPs of the products of layers and language-model head, attention apart."""
    bounds = [forest.token_count * number // blocks for number in range(blocks + 1)]
    run = LayoutRun(blocks=list(itertools.pairwise(bounds)), is_offloaded=blocks > 1)
    drafting = Drafting(head.model, [forest], loss_weight=1.0)
    states = drafting.room(forest, run)
    kept = torch.randn(forest.token_count, 32)
    for start, end in run.blocks:
        states.keep(start, end, kept[start:end])
    with FlopCounterMode(display=False) as counter:
        drafting.add_gradients(forest, states, run, head_chunk=16)
    counts = counter.get_flop_counts()["Global"]
    return sum(count for op, count in counts.items() if str(op) in ("aten.mm", "aten.addmm"))


@pytest.mark.parametrize("depths", [1, 2])
@pytest.mark.parametrize("blocks", [1, 3])
def test_the_products_of_a_head_are_those_of_the_formula(
    tmp_path: Path, depths: int, blocks: int
) -> None:
    forest = _forest()
    head, policy = with_draft_head(
        save_head(tmp_path), prepare(make_model("qwen3", torch.float32)), top_k=5, depths=depths
    )
    draft = policy.shape.draft
    assert draft is not None
    assert draft.parameters == sum(p.numel() for p in head.layer.parameters())
    cost = draft_flops(draft, forest.position_N)
    pairs = with_lone_roots(forest).attention_pairs
    attention = depths * draft.query_size * pairs
    planned = cost.trained_N.sum() - 14 * attention
    if blocks > 1:
        planned += cost.read_N.sum() - 4 * attention
    assert _products(head, forest, blocks) == planned


DRAFT = DraftShape(
    hidden=32,
    query_size=32,
    key_size=16,
    mlp_size=48,
    vocabulary=64,
    value_bytes=4,
    wide_bytes=4,
    depths=2,
)
SHAPE_WITH_HEAD = replace(SHAPE, draft=DRAFT)


def test_blocks_count_the_forward_that_a_head_runs_once_more() -> None:
    forests = [_forest(), read_tree(merge(adversarial_samples(np.random.default_rng(1))))]
    costs = [draft_flops(DRAFT, forest.position_N) for forest in forests]
    without, beside = (
        StepLayouts(forests, shape=shape).layout((0, 1)) for shape in (SHAPE, SHAPE_WITH_HEAD)
    )
    starts = beside.cut(blocks=3, ranks=2)
    alone, both = (layout.range_flops(starts) for layout in (without, beside))
    trained, read = (both.trained_KR - alone.trained_KR, both.read_KR - alone.read_KR)
    assert trained.sum() == sum(cost.trained_N.sum() for cost in costs)
    assert read.sum() == sum(cost.read_N.sum() for cost in costs)
    assert (trained > read).all()
    assert (read > 0).all()


def test_ranks_of_a_team_share_what_policy_and_head_compute() -> None:
    """A bush has more rows of the policy's head than a line: to a draft head both are alike."""
    long = line_of(400)
    bush = read_tree(merge(agent_samples(np.random.default_rng(2), rollouts=6, turns=3), "b"))
    idle = {}
    for name, shape in (("policy", SHAPE), ("both", SHAPE_WITH_HEAD)):
        starts = StepLayouts([long, bush], shape=shape).layout((0, 1)).cut(blocks=1, ranks=2)
        layout = StepLayouts([long, bush], shape=SHAPE_WITH_HEAD).layout((0, 1))
        flops = layout.range_flops(starts).trained_KR
        idle[name] = 1 - flops.mean() / flops.max()
    assert idle["both"] < 0.01 < idle["policy"]


def test_a_planned_step_counts_the_flops_of_its_head() -> None:
    trees = (line_of(1000), line_of(700))
    ranks = Ranks(
        grid=RankGrid(shards=1, replicas=1),
        values=GatheredValues(layers=6000, root=300, head=200, trained=6500),
        budget_bytes=10**9,
        head_chunk=8,
    )
    alone, beside = (
        planned_step(trees, shape=shape, ranks=ranks) for shape in (SHAPE, SHAPE_WITH_HEAD)
    )
    of_head = sum(draft_flops(DRAFT, tree.position_N).trained_N.sum() for tree in trees)
    assert beside.flops == beside.slowest_flops == alone.flops + of_head
