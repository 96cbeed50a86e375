"""Metrics of a step: the savings of its trees, and alarms."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from forgemq_contracts.model_families import MODEL_TYPES
from forgemq_contracts.steps import Alarm, TrainingMetrics
from forgemq_contracts.trees import MergedTree
from forgemq_trainer.core.alarms import Thresholds, alarms
from forgemq_trainer.core.flops import flops, flops_of_tree, layer_weights, savings
from forgemq_trainer.core.layer_parts import LayerParts, Windows
from forgemq_trainer.core.memory import ModelShape
from forgemq_trainer.core.tree import read_tree
from forgemq_trainer.model_sizes import model_shape
from tests.unit.trainer.scene import Sample, agent_samples, make_model, merge

SHAPE = ModelShape(
    layers=3,
    hidden=8,
    query_size=8,
    key_size=4,
    mlp_size=16,
    vocabulary=32,
    value_bytes=4,
    wide_bytes=4,
)
TURNS = 3
QUIET = Thresholds(logprob_gap_mean=0.1, kl_k3=0.2, ratio_p99=3.0, capped_share=0.5)
METRICS = TrainingMetrics(
    loss=0.0,
    grad_norm=1.0,
    lr=1e-3,
    loss_tokens=1,
    tree_tokens=1,
    request_tokens=1,
    append_tokens=1,
    attention_pairs=1,
    ratio_mean=1.0,
    ratio_p99=2.0,
    capped_share=0.1,
    logprob_gap_mean=0.01,
    logprob_gap_max=0.3,
    kl_k3=0.01,
    entropy=1.0,
    staleness_max=0,
    forward_backward_s=0.1,
    gap_entries=1,
)


def _by_episode(samples: list[Sample]) -> MergedTree:
    tree = merge(samples)
    numbers = np.arange(len(samples), dtype="<i4")
    return msgspec.structs.replace(
        tree,
        sample_episode=(numbers // TURNS).astype("<i4").tobytes(),
        sample_turn=(numbers % TURNS).astype("<i4").tobytes(),
    )


def _samples(*, is_stripped: bool) -> list[Sample]:
    return agent_samples(np.random.default_rng(0), turns=TURNS, is_stripped=is_stripped)


def test_branch_loss_is_1_if_histories_only_grow_and_above_1_if_they_are_rewritten() -> None:
    growing = read_tree(_by_episode(_samples(is_stripped=False)))
    assert savings(SHAPE, [growing]).branch_loss == 1.0
    stripped = read_tree(_by_episode(_samples(is_stripped=True)))
    parents = stripped.parent_N.tolist()
    leaves = np.frombuffer(merge(_samples(is_stripped=True)).sample_leaf, "<i4")
    trunk = set()
    for leaf in leaves[TURNS - 1 :: TURNS].tolist():
        token = leaf
        while token >= 0:
            trunk.add(token)
            token = parents[token]
    expected = stripped.token_count / len(trunk)
    assert expected > 1.1
    assert savings(SHAPE, [stripped]).branch_loss == pytest.approx(expected)


def test_the_flop_ratio_counts_every_request_alone_against_the_tree() -> None:
    samples = _samples(is_stripped=False)
    forest = read_tree(_by_episode(samples))
    lengths = [len(sample.tokens) for sample in samples]
    alone = flops(
        SHAPE,
        tokens=sum(lengths),
        pairs=sum(n * (n + 1) // 2 for n in lengths),
        rows=forest.entry_count,
    )
    sources = {
        (int(forest.parent_N[token]), temperature)
        for token, temperature in zip(forest.entry_token_E, forest.entry_temperature_E, strict=True)
    }
    tree = flops(
        SHAPE,
        tokens=forest.token_count,
        pairs=sum(int(position) + 1 for position in forest.position_N),
        rows=len(sources),
    )
    assert savings(SHAPE, [forest]).flop_ratio == pytest.approx(alone.total / tree.total)
    assert savings(SHAPE, [forest]).flop_ratio > 2


def test_the_ratios_of_weights_and_attention_are_those_of_tokens_and_pairs() -> None:
    samples = _samples(is_stripped=True)
    forest = read_tree(_by_episode(samples))
    lengths = [len(sample.tokens) for sample in samples]
    found = savings(SHAPE, [forest])
    assert found.flop_ratio_weights == pytest.approx(sum(lengths) / forest.token_count)
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    assert found.flop_ratio_attention == pytest.approx(pairs / forest.attention_pairs)
    assert found.flop_ratio_attention < found.flop_ratio < found.flop_ratio_weights


def test_the_formula_by_hand() -> None:
    found = flops(SHAPE, tokens=10, pairs=55, rows=4)
    assert found.weights == 6 * 3 * (2 * 8 * (8 + 4) + 3 * 8 * 16) * 10
    assert found.attention == 14 * 3 * 8 * 55
    assert found.head == 8 * 8 * 32 * 4
    assert found.total == found.weights + found.attention + found.head


def test_a_query_under_a_window_visits_no_more_pairs_than_that() -> None:
    """Of three layers two have a window of 5 tokens; counted token by token."""
    shape = replace(SHAPE, parts=LayerParts(windows=Windows(size=5, layers=2)))
    samples = _samples(is_stripped=True)
    forest = read_tree(_by_episode(samples))

    def visited(positions: list[int]) -> int:
        return sum(position + 1 + 2 * min(position + 1, 5) for position in positions)

    of_tree = visited(forest.position_N.tolist())
    assert flops_of_tree(shape, forest).attention == 14 * 8 * of_tree
    of_requests = sum(visited(list(range(len(sample.tokens)))) for sample in samples)
    found = savings(shape, [forest, forest])
    assert found.flop_ratio_attention == pytest.approx(of_requests / of_tree)


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_the_weights_of_the_formula_are_the_models_matrices_that_a_token_uses(kind: str) -> None:
    model = make_model(kind, torch.float32)
    shape = model_shape(model.config, dtype=torch.float32)
    used = 0.0
    for name, parameter in model.named_parameters():
        if ".layers." in name and parameter.dim() > 1 and not name.endswith("bias"):
            is_expert = parameter.dim() == 3
            used += parameter.numel() * (
                shape.experts_per_token / shape.experts if is_expert else 1
            )
    assert layer_weights(shape) == used


def test_narrower_values_count_for_less_than_queries() -> None:
    shape = model_shape(make_model("deepseek_v3", torch.float32).config, dtype=torch.float32)
    found = flops(shape, tokens=0, pairs=10, rows=0)
    # 2 layers of 4 heads of 12 and 6: three products have the size of queries after the first, two
    # that of values after the first.
    assert found.attention == 2 * 10 * (2 * 4 * (12 + 6) + 2 * 4 * (3 * 12 + 2 * 6))


def test_a_step_of_no_groups_saves_nothing() -> None:
    nothing = savings(SHAPE, [])
    assert (nothing.flop_ratio, nothing.branch_loss) == (1.0, 1.0)


def test_a_tree_whose_samples_do_not_match_its_leaves_is_refused() -> None:
    tree = merge(_samples(is_stripped=False))
    with pytest.raises(ValueError, match="sample_leaf: must have 9 items, has 8"):
        msgspec.structs.replace(tree, sample_leaf=tree.sample_leaf[:-4])


@pytest.mark.parametrize(
    ("metric", "value", "threshold"),
    [
        ("logprob_gap_mean", 0.11, 0.1),
        ("kl_k3", 0.21, 0.2),
        ("ratio_p99", 3.1, 3.0),
        ("capped_share", 0.51, 0.5),
    ],
)
def test_each_metric_alarms_above_its_threshold_and_not_at_it(
    metric: str, value: float, threshold: float
) -> None:
    above = msgspec.structs.replace(METRICS, **{metric: value})
    assert alarms(above, QUIET) == (Alarm(metric=metric, value=value, threshold=threshold),)
    at = msgspec.structs.replace(METRICS, **{metric: threshold})
    assert alarms(at, QUIET) == ()


def test_a_gap_that_was_not_measured_raises_no_alarm() -> None:
    unmeasured = msgspec.structs.replace(METRICS, gap_entries=0, logprob_gap_mean=9.0)
    assert alarms(unmeasured, QUIET) == ()


def test_a_threshold_of_zero_never_alarms() -> None:
    off = Thresholds(logprob_gap_mean=0, kl_k3=0, ratio_p99=0, capped_share=0)
    wild = msgspec.structs.replace(METRICS, ratio_p99=1e9, kl_k3=1e9, logprob_gap_mean=1e9)
    assert alarms(wild, off) == ()
