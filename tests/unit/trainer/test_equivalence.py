"""G5: a tree's losses and gradients are those of training its requests one by one."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from forgemq_contracts.loss import Loss
from forgemq_trainer.core.loss import LossFunction, loss_function
from forgemq_trainer.core.loss_weights import group_loss_weights
from forgemq_trainer.core.memory import Microbatch
from forgemq_trainer.core.precision import make_precise
from forgemq_trainer.core.step import Objective, forward_backward
from forgemq_trainer.core.tree import joined, read_tree
from forgemq_trainer.model import prepare
from tests.unit.trainer.scene import (
    Sample,
    adversarial_samples,
    agent_samples,
    make_model,
    make_sample,
    merge,
    of_every_kind,
    sample_entries,
)

Gradients = dict[str, torch.Tensor]
HEAD_CHUNK = 8


def _groups(seed: int) -> list[list[Sample]]:
    generator = np.random.default_rng(seed)
    return [
        agent_samples(generator),
        adversarial_samples(generator),
        agent_samples(generator, is_stripped=True),
    ]


def _take_gradients(model: nn.Module) -> Gradients:
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return gradients


def _per_request(
    model: nn.Module, groups: Sequence[Sequence[Sample]], loss: LossFunction
) -> tuple[float, Gradients]:
    """Train every request alone, with torch's causal attention."""
    total = 0.0
    count = sum(len(sample.behaviour) for samples in groups for sample in samples)
    for sample in (sample for samples in groups for sample in samples):
        tokens = torch.tensor([sample.tokens])
        logits = model(input_ids=tokens, use_cache=False).logits[0] / sample.temperature
        sampled = torch.arange(sample.first_sampled, len(sample.tokens))
        rows = torch.arange(len(sampled))
        logprob = logits[sampled - 1].log_softmax(-1)[rows, tokens[0, sampled]]
        result = loss(logprob, sample_entries(sample, logprob.dtype))
        part = result.loss.sum() / count
        part.backward()
        total += float(part.detach())
    return total, _take_gradients(model)


def _tree(
    model: nn.Module,
    groups: Sequence[Sequence[Sample]],
    loss: LossFunction,
    block: int | None,
    recomputed: int = 0,
) -> tuple[float, Gradients]:
    """Train all groups as one forest: whole, perhaps with layers recomputed, or in blocks."""
    forests = [read_tree(merge(samples, f"g-{n}")) for n, samples in enumerate(groups)]
    count = sum(forest.token_count for forest in forests)
    size = count if block is None else block
    blocks = tuple((start, min(start + size, count)) for start in range(0, count, size))
    seen = forward_backward(
        prepare(model).policy,
        Objective(
            forests=forests,
            loss_weights=group_loss_weights(forests, loss=Loss()),
            loss=loss,
        ),
        [
            Microbatch(
                groups=tuple(range(len(forests))), blocks=blocks, recomputed_layers=recomputed
            )
        ],
        head_chunk=HEAD_CHUNK,
    )
    return seen.loss, _take_gradients(model)


def _worst(left: Gradients, right: Gradients) -> float:
    """Largest ||difference|| / ||gradient|| over the parameters.

    A gradient that should be 0 is all rounding, so each norm counts as at least a thousandth of
    the largest.
    """
    assert left.keys() == right.keys()
    floor = 1e-3 * max(gradient.norm() for gradient in left.values())
    return max(
        float((left[name] - right[name]).norm() / torch.maximum(left[name].norm(), floor))
        for name in left
    )


def _made(kind: str, dtype: torch.dtype, **changes: object) -> nn.Module:
    model = make_model(kind, dtype, **changes)
    if model.config.to_dict().get("num_experts_per_tok"):
        model.set_experts_implementation("eager")  # The grouped kernel has no float64.
    # The stock class of gpt-oss has its sinks in its own attention alone.
    model.set_attn_implementation("eager" if kind == "gpt_oss" else "sdpa")
    return model


SLOW_LOSSES = ("ppo_clip", "truncated_is", "icepop")
"""Beside GSPO, whose ratios are those of whole completions, and the default, CISPO."""


@of_every_kind
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float64, 1e-12), pytest.param(torch.float32, 1e-5, marks=pytest.mark.slow)],
    ids=["fp64", "fp32"],
)
def test_tree_and_per_request_gradients_are_equal(
    kind: str, changes: dict[str, object], dtype: torch.dtype, bound: float
) -> None:
    model = _made(kind, dtype, **changes)
    make_precise(model)
    groups, loss = _groups(3), loss_function(Loss())
    expected_loss, expected = _per_request(model, groups, loss)
    for block, recomputed in ((None, 0), (None, 1), (None, 2), (37, 0)):
        tree_loss, gradients = _tree(model, groups, loss, block, recomputed)
        assert tree_loss == pytest.approx(expected_loss, rel=max(bound, 1e-13))
        assert _worst(expected, gradients) <= bound


@pytest.mark.parametrize(
    "kind",
    ["qwen3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama", "qwen3_moe"))],
)
def test_against_stock_modules_only_their_rounding_differs(kind: str) -> None:
    """Norm and rotary embedding of transformers round float64 to fp32; the trainer's do not."""
    model = _made(kind, torch.float64)
    groups, loss = _groups(4), loss_function(Loss())
    _, expected = _per_request(model, groups, loss)
    _, gradients = _tree(model, groups, loss, None)
    assert 1e-12 < _worst(expected, gradients) <= 1e-6


@pytest.mark.parametrize(
    "kind",
    ["gspo", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW_LOSSES)],
)
def test_every_loss_is_exact_whole_recomputed_and_in_blocks(kind: str) -> None:
    model = _made("qwen3", torch.float64)
    make_precise(model)
    groups, loss = _groups(5), loss_function(Loss(kind=kind))
    expected_loss, expected = _per_request(model, groups, loss)
    for block, recomputed in ((None, 0), (None, 1), (11, 0)):
        tree_loss, gradients = _tree(model, groups, loss, block, recomputed)
        assert tree_loss == pytest.approx(expected_loss, rel=1e-12)
        assert _worst(expected, gradients) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_trees_in_blocks_of_any_size_are_exact(seed: int) -> None:
    generator = np.random.default_rng(seed)
    model = _made("qwen3", torch.float64)
    make_precise(model)
    groups = [
        agent_samples(
            generator,
            rollouts=int(generator.integers(1, 4)),
            turns=int(generator.integers(1, 4)),
            prompt=int(generator.integers(1, 12)),
            act=int(generator.integers(1, 5)),
            vocabulary=int(generator.choice([3, 61])),
            is_stripped=bool(generator.integers(0, 2)),
        )
        for _ in range(2)
    ]
    loss = loss_function(Loss())
    expected_loss, expected = _per_request(model, groups, loss)
    tree_loss, gradients = _tree(model, groups, loss, int(generator.integers(1, 60)))
    assert tree_loss == pytest.approx(expected_loss, rel=1e-12)
    assert _worst(expected, gradients) <= 1e-12


def test_opposite_advantages_of_one_token_cancel() -> None:
    generator = np.random.default_rng(0)
    sample = adversarial_samples(generator)[0]
    twins = [
        Sample(sample.tokens, sample.first_sampled, sign, sample.behaviour, sample.temperature)
        for sign in (1.0, -1.0)
    ]
    model = _made("qwen3", torch.float64)
    _, gradients = _tree(model, [twins], loss_function(Loss()), None)
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) < 1e-15


def test_gradients_that_are_zero_are_zero_in_the_tree_too() -> None:
    generator = np.random.default_rng(5)  # One token of context: no output depends on the scores.
    groups = [[make_sample([3], [token], generator) for token in (4, 5, 6)]]
    model = _made("qwen3", torch.float64)
    make_precise(model)
    _, expected = _per_request(model, groups, loss_function(Loss()))
    zeros = [name for name, gradient in expected.items() if "q_proj" in name and gradient.norm()
             < 1e-12]  # fmt: skip
    assert len(zeros) == 2
    for block in (None, 1):
        _, gradients = _tree(model, groups, loss_function(Loss()), block)
        assert _worst(expected, gradients) < 1e-12


def test_changing_a_sibling_changes_no_log_probability() -> None:
    generator = np.random.default_rng(2)
    samples = agent_samples(generator, rollouts=3, turns=2)
    changed = [
        sample if n < 4 else Sample(
            tokens=(*sample.tokens[: sample.first_sampled - 3], 1, 2, 3,
                    *(1 for _ in sample.behaviour)),
            first_sampled=sample.first_sampled,
            advantage=sample.advantage,
            behaviour=sample.behaviour,
            temperature=sample.temperature,
        )
        for n, sample in enumerate(samples)
    ]  # fmt: skip
    kept = sum(len(sample.behaviour) for sample in samples[:4])
    policy = prepare(_made("qwen3", torch.float64)).policy
    seen = []
    for version in (samples, changed):
        forest = read_tree(merge(version))
        values = forward_backward(
            policy,
            Objective(forests=[forest], loss_weights=[1.0], loss=loss_function(Loss())),
            [Microbatch(groups=(0,), blocks=((0, forest.token_count),))],
            head_chunk=HEAD_CHUNK,
        )
        seen.append(values.logprob_E)
    assert np.abs(seen[0][:kept] - seen[1][:kept]).max() < 1e-13
    assert np.abs(seen[0][kept:] - seen[1][kept:]).max() > 1e-3


@pytest.mark.slow
def test_bfloat16_is_as_near_to_the_truth_as_per_request_training() -> None:
    groups, loss = _groups(6), loss_function(Loss())
    exact = _made("qwen3", torch.float64)
    make_precise(exact)
    _, truth = _per_request(exact, groups, loss)
    narrow = _made("qwen3", torch.bfloat16)
    narrow.load_state_dict({k: v.bfloat16() for k, v in exact.state_dict().items()})
    _, gradients = _tree(narrow, groups, loss, None)
    widened = {name: gradient.double() for name, gradient in gradients.items()}
    assert _worst(truth, widened) < 0.15


def test_the_order_of_groups_in_a_forest_does_not_matter() -> None:
    model = _made("qwen3", torch.float64)
    groups, loss = _groups(7), loss_function(Loss())
    assert joined([read_tree(merge(g)) for g in groups]).token_count > 100
    _, left = _tree(model, groups, loss, None)
    _, right = _tree(model, groups[::-1], loss, None)
    assert _worst(left, right) < 1e-12


def test_fields_that_ask_for_other_outputs_change_nothing() -> None:
    """A config.json may say both; hidden states that are given out would stay in memory."""
    groups, loss = _groups(8)[:1], loss_function(Loss())
    expected_loss, expected = _tree(_made("qwen3", torch.float64), groups, loss, None)
    model = _made("qwen3", torch.float64, return_dict=False, output_hidden_states=True)
    assert model.config.output_hidden_states
    tree_loss, gradients = _tree(model, groups, loss, None)
    assert tree_loss == expected_loss
    assert _worst(expected, gradients) == 0
    assert not model.config.output_hidden_states
