"""How a step is cut for ranks and for a budget."""

import itertools

import numpy as np
import pytest

from forgemq.trainer.core.memory import BLOCK_TOKENS_MIN, ModelShape, plan_step
from forgemq.trainer.core.tree import Forest, read_tree
from tests.unit.trainer.scene import agent_samples, make_sample, merge

SHAPE = ModelShape(
    layers=2,
    hidden=32,
    query_size=32,
    key_size=16,
    mlp_size=48,
    vocabulary=64,
    value_bytes=4,
    wide_bytes=4,
)
HEAD = SHAPE.head_bytes(chunk=8)


def _line(length: int) -> Forest:
    generator = np.random.default_rng(length)
    context = generator.integers(1, 60, length - 1).tolist()
    return read_tree(merge([make_sample(context, [7], generator)], f"g-{length}"))


def _budget(tokens: int) -> int:
    return HEAD + tokens * SHAPE.activation_bytes_per_token


def test_groups_are_packed_while_they_fit() -> None:
    forests = [_line(60), _line(30), _line(50), _line(10)]
    (rank,) = plan_step(forests, shape=SHAPE, world_size=1, budget_bytes=_budget(100), head_chunk=8)
    assert [microbatch.groups for microbatch in rank] == [(0, 1), (2, 3)]
    assert [microbatch.blocks for microbatch in rank] == [((0, 90),), ((0, 60),)]


def test_a_group_over_the_budget_runs_in_even_blocks_within_it() -> None:
    forests = [_line(1000), _line(50)]
    budget = HEAD + 1000 * SHAPE.carry_bytes_per_token + 300 * SHAPE.activation_bytes_per_token
    (rank,) = plan_step(forests, shape=SHAPE, world_size=1, budget_bytes=budget, head_chunk=8)
    by_groups = {microbatch.groups: microbatch.blocks for microbatch in rank}
    assert by_groups == {
        (0,): ((0, 250), (250, 500), (500, 750), (750, 1000)),
        (1,): ((0, 50),),
    }


def test_a_budget_below_the_least_is_refused_with_the_missing_bytes() -> None:
    least = (
        HEAD
        + 1000 * SHAPE.carry_bytes_per_token
        + BLOCK_TOKENS_MIN * SHAPE.activation_bytes_per_token
    )
    plan_step([_line(1000)], shape=SHAPE, world_size=1, budget_bytes=least, head_chunk=8)
    with pytest.raises(ValueError, match="memory_budget_bytes is 1 bytes too small"):
        plan_step([_line(1000)], shape=SHAPE, world_size=1, budget_bytes=least - 1, head_chunk=8)


def test_ranks_get_every_group_once_and_similar_cost() -> None:
    generator = np.random.default_rng(0)
    forests = [
        read_tree(merge(agent_samples(generator, rollouts=int(n)), f"g-{i}"))
        for i, n in enumerate(generator.integers(1, 6, 24))
    ]
    ranks = plan_step(forests, shape=SHAPE, world_size=3, budget_bytes=_budget(400), head_chunk=8)
    groups = [[g for microbatch in rank for g in microbatch.groups] for rank in ranks]
    assert sorted(itertools.chain(*groups)) == list(range(24))
    costs = [
        sum(
            SHAPE.cost(tokens=forests[g].token_count, attention_pairs=forests[g].attention_pairs)
            for g in rank
        )
        for rank in groups
    ]
    assert max(costs) / min(costs) < 1.05
    again = plan_step(forests, shape=SHAPE, world_size=3, budget_bytes=_budget(400), head_chunk=8)
    assert again == ranks
