"""A loss with a KL to the model that its run started from."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from forgemq_contracts import topics
from forgemq_contracts.loss import Loss
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.steps import TrainingMetrics
from forgemq_trainer.core.loss import loss_function
from forgemq_trainer.core.memory import Microbatch
from forgemq_trainer.core.precision import make_precise
from forgemq_trainer.core.reference import with_references
from forgemq_trainer.core.step import Objective, forward_backward
from forgemq_trainer.core.tree import read_tree
from forgemq_trainer.model import prepare
from forgemq_trainer.training import Training
from tests.unit.trainer.scene import (
    Sample,
    adversarial_samples,
    agent_samples,
    configuration_of,
    make_model,
    merge,
    sample_entries,
    save_base,
    scheduled_step,
)

NEAR = Loss(reference_weight=0.3)


def _groups() -> list[list[Sample]]:
    generator = np.random.default_rng(1)
    return [agent_samples(generator), adversarial_samples(generator)]


def _logprob(model: nn.Module, sample: Sample) -> Tensor:
    tokens = torch.tensor([sample.tokens])
    logits = model(input_ids=tokens, use_cache=False).logits[0] / sample.temperature
    places = torch.arange(sample.first_sampled, len(sample.tokens))
    return logits[places - 1].log_softmax(-1)[torch.arange(len(places)), tokens[0, places]]


def _per_request(
    model: nn.Module, reference: nn.Module, groups: Sequence[Sequence[Sample]]
) -> dict[str, Tensor]:
    loss = loss_function(Loss())
    for sample in (sample for samples in groups for sample in samples):
        logprob = _logprob(model, sample)
        with torch.no_grad():
            near = _logprob(reference, sample)
        ratio = torch.exp(near - logprob)
        kl = ratio - 1 - (near - logprob)
        (
            loss(logprob, sample_entries(sample, torch.float64, reference=near)).loss + 0.3 * kl
        ).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("size", [10_000, 20])
def test_gradients_near_a_reference_are_those_of_every_request_alone(kind: str, size: int) -> None:
    groups = _groups()
    model, other = (make_model(kind, torch.float64) for _ in range(2))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    for each in (model, other):
        if kind == "qwen3_moe":
            each.set_experts_implementation("eager")  # The grouped kernel has no float64.
        each.set_attn_implementation("sdpa")
        make_precise(each)
    expected = _per_request(model, other, groups)
    model.zero_grad()
    forests = [read_tree(merge(samples, f"g-{n}")) for n, samples in enumerate(groups)]
    count = sum(forest.token_count for forest in forests)
    blocks = tuple((start, min(start + size, count)) for start in range(0, count, size))
    microbatches = [Microbatch(groups=(0, 1), blocks=blocks)]
    policy = prepare(model).policy
    filled = with_references(prepare(other).policy, forests, microbatches, head_chunk=8)
    forward_backward(
        policy,
        Objective(forests=filled, loss_weights=[1.0, 1.0], loss=loss_function(NEAR)),
        microbatches,
        head_chunk=8,
    )
    for name, wanted in expected.items():
        seen = model.get_parameter(name).grad
        assert seen is not None
        assert float((seen - wanted).norm() / wanted.norm()) < 1e-12


def test_recorded_references_stay_and_missing_ones_are_filled_in() -> None:
    forest = read_tree(merge(_groups()[0]))
    recorded = np.full(forest.entry_count, np.nan)
    recorded[::2] = -1.5
    microbatches = [Microbatch(groups=(0,), blocks=((0, forest.token_count),))]
    policy = prepare(make_model("qwen3", torch.float64)).policy
    half = [replace(forest, entry_reference_E=recorded)]
    (filled,) = with_references(policy, half, microbatches, head_chunk=8)
    (whole,) = with_references(policy, [forest], microbatches, head_chunk=8)
    assert (filled.entry_reference_E[::2] == -1.5).all()
    assert np.array_equal(filled.entry_reference_E[1::2], whole.entry_reference_E[1::2])
    assert (whole.entry_reference_E < 0).all()


def _trained(configuration: RunConfiguration) -> tuple[list[TrainingMetrics], Tensor]:
    training = Training(configuration, device="cpu", checkpoint=None)
    metrics = []
    for step in range(3):
        trees = [merge(samples, f"g-{n}") for n, samples in enumerate(_groups())]
        values = {tree.group_id: topics.encode(tree) for tree in trees}
        metrics.append(training.train(training.read(scheduled_step(step, trees), values)))
    return metrics, torch.cat([p.detach().reshape(-1) for p in training.model.parameters()])


def test_a_run_starts_at_its_reference_and_stays_nearer_to_it(tmp_path: Path) -> None:
    free = configuration_of(save_base(tmp_path / "base"))
    near = msgspec.structs.replace(free, loss=Loss(reference_weight=20.0))
    metrics, weights = _trained(near)
    free_metrics, free_weights = _trained(free)
    assert metrics[0].kl_reference < 1e-9
    assert metrics[0].grad_norm == pytest.approx(free_metrics[0].grad_norm, rel=1e-4)
    assert metrics[2].kl_reference > 0
    assert [step.kl_reference for step in free_metrics] == [0.0, 0.0, 0.0]
    assert not torch.equal(weights, free_weights)
    base = prepare(make_model("qwen3", torch.float32)).model
    start = torch.cat([p.detach().reshape(-1) for p in base.parameters()])
    assert (weights - start).norm() < (free_weights - start).norm()


def test_a_reference_adds_the_k3_estimate_and_a_missing_one_adds_0() -> None:
    sample = Sample((1, 2, 3, 4), 1, 0.0, (-1.0, -1.0, -1.0))
    logprob = torch.tensor([-2.0, -2.0, -2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-2.0, -1.0, float("nan")], dtype=torch.float64)
    loss = loss_function(NEAR)(
        logprob, sample_entries(sample, torch.float64, reference=reference)
    ).loss
    (slope,) = torch.autograd.grad(loss.sum(), logprob)
    assert loss.tolist() == pytest.approx([0.0, 0.3 * (np.e - 2), 0.0])
    assert slope.tolist() == pytest.approx([0.0, 0.3 * (1 - np.e), 0.0])
