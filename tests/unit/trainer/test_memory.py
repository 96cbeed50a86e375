"""How a step is cut for a budget, and that torch holds the predicted bytes while it runs."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch_allocation import peak_allocated_bytes

from forgemq_contracts.loss import Loss
from forgemq_trainer.core.attention.carry import KeyShape, PathKeys
from forgemq_trainer.core.attention.plan import pieces
from forgemq_trainer.core.loss import loss_function
from forgemq_trainer.core.memory import (
    BLOCK_TOKENS_MIN,
    Microbatch,
    ModelShape,
    least_budget_bytes,
)
from forgemq_trainer.core.microbatches import path_microbatch, plan_step
from forgemq_trainer.core.paths import path_of
from forgemq_trainer.core.step import Objective, forward_backward
from forgemq_trainer.core.tree import Forest, read_tree
from forgemq_trainer.model import LoadedModel, prepare
from tests.unit.trainer.scene import SHAPE, Sample, agent_samples, line_of, make_model, merge


def _bush(rollouts: int, *, turns: int = 4) -> Forest:
    generator = np.random.default_rng(0)
    samples = agent_samples(
        generator, rollouts=rollouts, turns=turns, prompt=60, act=20, observe=30, vocabulary=60
    )
    return read_tree(merge(samples, f"g-{rollouts}"))


def _budget(tokens: int) -> int:
    return SHAPE.block_bytes(tokens, chunk=8, is_carried=False)


def _in_blocks(forest: Forest, budget: int, *, shape: ModelShape = SHAPE) -> Microbatch:
    (microbatch,) = plan_step([forest], shape=shape, budget_bytes=budget, head_chunk=8)
    return microbatch


def _needed(forest: Forest, count: int, *, shape: ModelShape, is_offloaded: bool) -> int:
    """Bytes that so many even blocks need, counted token by token."""
    size = -(-forest.token_count // count)
    starts = range(0, forest.token_count, size)
    paths = [path_of(forest, start) for start in starts]
    slots = max(
        len(path) + min(size, forest.token_count - start)
        for start, path in zip(starts, paths, strict=True)
    )
    live = shape.block_bytes(size, chunk=8, is_carried=True) + slots * shape.carry_bytes_per_token
    if is_offloaded:
        return live
    return live + len(np.unique(np.concatenate(paths))) * shape.key_bytes_per_token


def test_groups_are_packed_while_they_fit() -> None:
    forests = [line_of(60), line_of(30), line_of(50), line_of(10)]
    plan = plan_step(forests, shape=SHAPE, budget_bytes=_budget(100), head_chunk=8)
    assert [microbatch.groups for microbatch in plan] == [(0, 1), (2, 3)]
    assert [microbatch.blocks for microbatch in plan] == [((0, 90),), ((0, 60),)]


def test_a_group_without_entries_runs_nowhere_whatever_fits() -> None:
    silent = read_tree(merge([Sample(tuple(range(500)), 500, 0.0, ())], "silent"))
    forests = [line_of(60), silent, line_of(30)]
    for budget in (_budget(100), 10**9):
        plan = plan_step(forests, shape=SHAPE, budget_bytes=budget, head_chunk=8)
        assert [microbatch.groups for microbatch in plan] == [(0, 2)]
    assert plan_step([silent], shape=SHAPE, budget_bytes=10**9, head_chunk=8) == ()


def test_a_group_over_the_budget_runs_in_even_blocks_within_it() -> None:
    forests = [line_of(1000), line_of(50)]
    block = SHAPE.block_bytes(250, chunk=8, is_carried=True)
    stored = 750 * SHAPE.key_bytes_per_token
    budget = block + 1000 * SHAPE.carry_bytes_per_token + stored
    plan = plan_step(forests, shape=SHAPE, budget_bytes=budget, head_chunk=8)
    by_groups = {microbatch.groups: microbatch.blocks for microbatch in plan}
    assert by_groups == {
        (0,): ((0, 250), (250, 500), (500, 750), (750, 1000)),
        (1,): ((0, 50),),
    }


def test_a_group_over_the_budget_recomputes_as_few_layers_as_fit_before_it_runs_in_blocks() -> None:
    forest, shape = line_of(1000), replace(SHAPE, layers=8)

    def layers(budget: int) -> tuple[int, int]:
        (microbatch,) = plan_step([forest], shape=shape, budget_bytes=budget, head_chunk=8)
        return microbatch.recomputed_layers, len(microbatch.blocks)

    needed = [
        shape.block_bytes(1000, chunk=8, is_carried=False, recomputed_layers=count)
        for count in range(8)
    ]
    assert [layers(budget) for budget in needed] == [(count, 1) for count in range(8)]
    assert [layers(budget - 1) for budget in needed[:-1]] == [(count, 1) for count in range(1, 8)]
    recomputed, blocks = layers(needed[-1] - 1)
    assert recomputed == 0
    assert blocks > 1


@pytest.mark.parametrize("tokens", [64, 100, 5000])
@pytest.mark.parametrize("is_carried", [False, True])
def test_a_block_of_the_longest_length_fits_and_a_longer_one_does_not(
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
    forest = line_of(1000)
    least = least_budget_bytes(SHAPE, longest_path=1000, head_chunk=8)
    with pytest.raises(ValueError, match=f"longest path of 1000 needs at most {least}"):
        _in_blocks(forest, SHAPE.block_bytes(BLOCK_TOKENS_MIN, chunk=8, is_carried=True))


def test_keys_are_offloaded_if_keeping_them_would_take_over_twice_the_blocks() -> None:
    """In one budget 10 blocks keep their keys, in a smaller one 12; offloaded, 5 fit into both."""
    forest, shape = _bush(2, turns=10), replace(SHAPE, key_size=64)
    kept_10, kept_12 = (_needed(forest, n, shape=shape, is_offloaded=False) for n in (10, 12))
    away_4, away_5 = (_needed(forest, n, shape=shape, is_offloaded=True) for n in (4, 5))
    assert away_5 <= kept_12 < kept_10 < away_4
    twice = _in_blocks(forest, kept_10, shape=shape)
    assert (len(twice.blocks), twice.is_offloaded) == (10, False)
    assert twice.predicted_bytes == kept_10
    more = _in_blocks(forest, kept_12, shape=shape)
    assert (len(more.blocks), more.is_offloaded) == (5, True)
    assert more.predicted_bytes == away_5


def test_the_prediction_counts_the_carries_slots() -> None:
    forest, shape = _bush(20), replace(SHAPE, slot_multiple=256)
    longest = int(forest.position_N.max()) + 1
    least = least_budget_bytes(shape, longest_path=longest, head_chunk=8)
    assert least > least_budget_bytes(SHAPE, longest_path=longest, head_chunk=8)
    plan = _in_blocks(forest, least, shape=shape)
    keys = PathKeys(
        forest,
        pieces(forest),
        plan.blocks,
        shape=KeyShape(
            layers=SHAPE.layers,
            heads=2,
            head_size=8,
            dtype=torch.float32,
            device=torch.device("cpu"),
            slot_multiple=256,
        ),
    )
    carried = sum(
        tensor.nbytes
        for carry in keys.enter(0).carries
        for tensor in (carry.key_KND, carry.value_KND, carry.key_grad_KND, carry.value_grad_KND)
    )
    block = shape.block_bytes(plan.blocks[0][1], chunk=8, is_carried=True)
    assert plan.is_offloaded
    assert plan.predicted_bytes == block + carried <= least


MANY_EXPERTS: dict[str, object] = {
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 32,
}
WINDOWED: dict[str, object] = {"layer_types": ["sliding_attention", "full_attention"] * 2}
LATENT: dict[str, object] = {
    "n_routed_experts": 8,
    "moe_intermediate_size": 96,
    "q_lora_rank": 80,
    "kv_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 24,
}

# Seconds each; the fast suite keeps one of each kind of plan.
slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, id="fp32"), slow(torch.bfloat16, id="bf16")]
)
@pytest.mark.parametrize(
    ("kind", "way", "share", "sizes"),
    [
        ("qwen3", "kept", 1.0, {}),
        slow("qwen3", "recomputed", 0.5, {}),
        slow("llama", "recomputed", 0.3, {"num_hidden_layers": 12}),
        slow("qwen3", "recomputed", 0.6, {"vocab_size": 4096, "num_hidden_layers": 6}),
        slow(
            "qwen3",
            "blocks",
            0.22,
            {
                "num_hidden_layers": 2,
                "hidden_size": 256,
                "intermediate_size": 1024,
                "vocab_size": 1024,
            },
        ),
        slow("qwen3", "blocks", 0.5, {"vocab_size": 4096, "num_hidden_layers": 6}),
        slow("llama", "blocks", 0.4, {}),
        slow(
            "llama",
            "blocks",
            0.9,
            {
                "num_hidden_layers": 2,
                "hidden_size": 64,
                "intermediate_size": 128,
                "vocab_size": 8192,
            },
        ),
        slow("qwen3_moe", "blocks", 0.4, {"num_experts": 8, "moe_intermediate_size": 96}),
        slow("qwen3_moe", "recomputed", 0.6, MANY_EXPERTS),
        slow("qwen3_moe", "kept", 1.0, MANY_EXPERTS),
        slow("gemma3_text", "blocks", 0.4, WINDOWED | {"sliding_window": 50}),
        slow(
            "minimax_m2",
            "kept",
            1.0,
            {"num_local_experts": 8, "intermediate_size": 96, "rotary_dim": 16},
        ),
        slow("glm4_moe", "blocks", 0.4, {"n_routed_experts": 8, "moe_intermediate_size": 96}),
        slow("glm4_moe", "kept", 1.0, {"first_k_dense_replace": 2, "use_qk_norm": True}),
        slow("glm4_moe", "recomputed", 0.7, {"first_k_dense_replace": 1, "use_qk_norm": True}),
        slow("gpt_oss", "kept", 1.0, WINDOWED | {"num_local_experts": 8, "intermediate_size": 96}),
        slow("gpt_oss", "blocks", 0.4, WINDOWED | {"num_local_experts": 8}),
        slow("deepseek_v3", "blocks", 0.4, LATENT),
        slow("deepseek_v3", "kept", 1.0, LATENT | {"q_lora_rank": None}),
    ],
)
def test_the_measured_peak_is_within_a_twentieth_of_the_predicted(
    kind: str, way: str, share: float, sizes: dict[str, object], dtype: torch.dtype
) -> None:
    """Counts torch's allocations, without the parameters' gradients."""
    changes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 4}
    loaded = prepare(make_model(kind, dtype, **(changes | sizes)))
    assert _peak_over_predicted(loaded, _bush(5), way, share) == pytest.approx(1, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("way", ["kept", "recomputed"])
def test_queries_wider_than_the_mlp_need_no_more_than_is_predicted(
    way: str, dtype: torch.dtype
) -> None:
    """Attention's backward is the peak, and needs less if queries are cut into several pieces."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4}
    heads = {"head_dim": 32, "num_attention_heads": 32, "num_key_value_heads": 2}
    loaded = prepare(make_model("qwen3", dtype, **(sizes | heads)))
    share = 1.0 if way == "kept" else 0.6
    assert _peak_over_predicted(loaded, line_of(500), way, share) == pytest.approx(1, rel=0.05)
    assert 0.75 < _peak_over_predicted(loaded, _bush(5), way, share) < 1.02


def _peak_over_predicted(loaded: LoadedModel, forest: Forest, way: str, share: float) -> float:
    """The peak of a step that runs in this way, in this share of the bytes for the whole forest."""
    shape, chunk = loaded.policy.shape, 32
    whole = shape.block_bytes(forest.token_count, chunk=chunk, is_carried=False)
    budget = int(whole * share)
    if way == "blocks":
        microbatch = path_microbatch(0, forest, shape=shape, budget_bytes=budget, head_chunk=chunk)
    else:
        (microbatch,) = plan_step([forest], shape=shape, budget_bytes=budget, head_chunk=chunk)
    assert not microbatch.is_offloaded  # torch would count the mapped file too
    assert (microbatch.recomputed_layers > 0, len(microbatch.blocks) > 1) == (
        way == "recomputed",
        way == "blocks",
    )

    def run() -> None:
        forward_backward(
            loaded.policy,
            Objective(forests=[forest], loss_weights=[1.0], loss=loss_function(Loss())),
            [microbatch],
            head_chunk=chunk,
        )

    run()  # Makes the parameters' gradients.
    return peak_allocated_bytes(run) / microbatch.predicted_bytes
