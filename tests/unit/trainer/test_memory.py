"""How a step is cut for ranks and for a budget, and that what runs holds what was predicted."""

import itertools

import numpy as np
import pytest
import torch

from forgemq.contracts.run import Loss
from forgemq.trainer.allocation import peak_allocated_bytes
from forgemq.trainer.core.loss import loss_function
from forgemq.trainer.core.memory import (
    BLOCK_TOKENS_MIN,
    Microbatch,
    ModelShape,
    least_budget_bytes,
    plan_step,
)
from forgemq.trainer.core.step import forward_backward
from forgemq.trainer.core.tree import Forest, read_tree
from forgemq.trainer.model import prepared
from tests.unit.trainer.scene import agent_samples, make_model, make_sample, merge

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


def _line(length: int) -> Forest:
    generator = np.random.default_rng(length)
    context = generator.integers(1, 60, length - 1).tolist()
    return read_tree(merge([make_sample(context, [7], generator)], f"g-{length}"))


def _bush(rollouts: int, *, seed: int = 0) -> Forest:
    generator = np.random.default_rng(seed)
    samples = agent_samples(
        generator, rollouts=rollouts, turns=4, prompt=60, act=20, observe=30, vocabulary=60
    )
    return read_tree(merge(samples, f"g-{rollouts}"))


def _budget(tokens: int) -> int:
    return SHAPE.block_bytes(tokens, chunk=8, is_carried=False)


def _in_blocks(forest: Forest, budget: int) -> Microbatch:
    ((microbatch,),) = plan_step(
        [forest], shape=SHAPE, world_size=1, budget_bytes=budget, head_chunk=8, carried="path"
    )
    return microbatch


def test_groups_are_packed_while_they_fit() -> None:
    forests = [_line(60), _line(30), _line(50), _line(10)]
    (rank,) = plan_step(forests, shape=SHAPE, world_size=1, budget_bytes=_budget(100), head_chunk=8)
    assert [microbatch.groups for microbatch in rank] == [(0, 1), (2, 3)]
    assert [microbatch.blocks for microbatch in rank] == [((0, 90),), ((0, 60),)]


def test_a_group_over_the_budget_runs_in_even_blocks_within_it() -> None:
    forests = [_line(1000), _line(50)]
    block = SHAPE.block_bytes(300, chunk=8, is_carried=True)
    budget = block + 1000 * SHAPE.carry_bytes_per_token
    (rank,) = plan_step(forests, shape=SHAPE, world_size=1, budget_bytes=budget, head_chunk=8)
    by_groups = {microbatch.groups: microbatch.blocks for microbatch in rank}
    assert by_groups == {
        (0,): ((0, 250), (250, 500), (500, 750), (750, 1000)),
        (1,): ((0, 50),),
    }


@pytest.mark.parametrize("tokens", [64, 100, 5000])
@pytest.mark.parametrize("is_carried", [False, True])
def test_a_block_of_the_longest_length_fits_and_one_token_more_does_not(
    *, tokens: int, is_carried: bool
) -> None:
    exact = SHAPE.block_bytes(tokens, chunk=8, is_carried=is_carried)
    assert SHAPE.block_tokens(exact, chunk=8, is_carried=is_carried) == tokens
    assert SHAPE.block_tokens(exact - 1, chunk=8, is_carried=is_carried) == tokens - 1


@pytest.mark.parametrize("rollouts", [1, 3, 20, 60])
def test_the_least_budget_follows_from_the_longest_path_however_many_rollouts(
    rollouts: int,
) -> None:
    forest = _bush(rollouts)
    longest = int(forest.position_N.max()) + 1
    least = least_budget_bytes(SHAPE, longest_path=longest, head_chunk=8)
    microbatch = _in_blocks(forest, least)
    assert microbatch.predicted_bytes <= least
    assert microbatch.blocks[0][0] == 0
    assert microbatch.blocks[-1][1] == forest.token_count
    if rollouts == 60:
        assert microbatch.is_offloaded
        assert least < 0.05 * _budget(forest.token_count)


def test_a_budget_below_the_least_is_refused_and_names_the_least() -> None:
    forest = _line(1000)
    least = least_budget_bytes(SHAPE, longest_path=1000, head_chunk=8)
    with pytest.raises(ValueError, match=f"longest path of 1000 needs at most {least}"):
        _in_blocks(forest, SHAPE.block_bytes(BLOCK_TOKENS_MIN, chunk=8, is_carried=True))


def test_more_budget_never_means_smaller_blocks_and_offloading_is_the_last_resort() -> None:
    forest = _bush(20)
    longest = int(forest.position_N.max()) + 1
    least = least_budget_bytes(SHAPE, longest_path=longest, head_chunk=8)
    plans = [_in_blocks(forest, int(least * factor)) for factor in (1, 1.5, 2, 3, 6)]
    sizes = [plan.blocks[0][1] for plan in plans if not plan.is_offloaded]
    assert sizes == sorted(sizes)
    offloaded = [plan.is_offloaded for plan in plans]
    assert offloaded == sorted(offloaded, reverse=True)
    assert len({plan.is_offloaded for plan in plans}) == 2


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


@pytest.mark.parametrize(
    ("kind", "share", "sizes"),
    [
        ("qwen3", 1.0, {}),
        ("qwen3", 0.4, {"intermediate_size": 512, "num_hidden_layers": 3}),
        ("qwen3", 0.3, {"vocab_size": 4096, "num_hidden_layers": 6}),
        ("llama", 0.2, {}),
        ("qwen3_moe", 0.4, {"num_experts": 8, "moe_intermediate_size": 96}),
    ],
)
def test_the_measured_peak_is_within_a_tenth_of_the_predicted(
    kind: str, share: float, sizes: dict[str, int]
) -> None:
    """Allocations of torch's own allocator, the gradients of the parameters apart."""
    changes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 4}
    loaded = prepared(make_model(kind, torch.float32, **(changes | sizes)))
    forest, shape, chunk = _bush(5), loaded.policy.shape, 32
    whole = shape.block_bytes(forest.token_count, chunk=chunk, is_carried=False)
    ((microbatch,),) = plan_step(
        [forest],
        shape=shape,
        world_size=1,
        budget_bytes=int(whole * share),
        head_chunk=chunk,
        carried="path",
    )

    def run() -> None:
        forward_backward(
            loaded.policy,
            [forest],
            [microbatch],
            weights=[1.0],
            loss=loss_function(Loss()),
            head_chunk=chunk,
        )

    run()  # The parameters' gradients exist from here on.
    peak = peak_allocated_bytes(run)
    assert peak == pytest.approx(microbatch.predicted_bytes, rel=0.1)
    assert len(microbatch.blocks) > 1 or share == 1.0
