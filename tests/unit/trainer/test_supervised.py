"""Replies that were given: their loss on trees is the NLL of each sample, beside any other loss."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from forgemq_contracts import topics
from forgemq_contracts.loss import Loss, SequenceMask
from forgemq_contracts.run import Queue
from forgemq_contracts.supervised import Supervised, loss_parts
from forgemq_trainer.core.loss import Entries, loss_function
from forgemq_trainer.core.loss_weights import group_loss_weights, mixed_loss_weights
from forgemq_trainer.core.memory import Microbatch
from forgemq_trainer.core.metrics import entry_metrics
from forgemq_trainer.core.precision import make_precise
from forgemq_trainer.core.rounds import values_bytes, values_of
from forgemq_trainer.core.step import EntryValues, Objective, forward_backward
from forgemq_trainer.core.tree import read_tree
from forgemq_trainer.model import prepare
from forgemq_trainer.training import Training
from tests.unit.trainer.scene import (
    Sample,
    agent_samples,
    configuration_of,
    make_model,
    merge,
    sample_entries,
    save_base,
    scheduled_step,
)

FRACTIONS = {"talks": 0.25}
DOMAINS = ("talks", "desk", "talks")
CLOSE = 1e-12


def groups_of(seed: int) -> list[list[Sample]]:
    """A conversation of several turns, rollouts of a task, and another conversation."""
    generator = np.random.default_rng(seed)
    return [
        [replace(one, advantage=1.0, temperature=1.0) for one in samples]
        if domain == "talks"
        else samples
        for domain, samples in zip(
            DOMAINS,
            (
                agent_samples(generator, rollouts=1, turns=3),
                agent_samples(generator, rollouts=3, turns=2),
                agent_samples(generator, rollouts=1, turns=2),
            ),
            strict=True,
        )
    ]


def exact_model() -> nn.Module:
    model = make_model("qwen3", torch.float64)
    model.set_attn_implementation("sdpa")
    make_precise(model)
    return model


def taken(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: each.grad.clone() for name, each in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def logprobs(model: nn.Module, sample: Sample) -> torch.Tensor:
    tokens = torch.tensor([sample.tokens])
    logits = model(input_ids=tokens, use_cache=False).logits[0] / sample.temperature
    sampled = torch.arange(sample.first_sampled, len(sample.tokens))
    return logits[sampled - 1].log_softmax(-1)[torch.arange(len(sampled)), tokens[0, sampled]]


def by_sample(
    model: nn.Module, groups: Sequence[Sequence[Sample]], loss: Loss
) -> tuple[float, dict[str, torch.Tensor]]:
    """0.25 * mean NLL of the conversations + 0.75 * the run's loss of the rollouts, one by one."""
    sampled = loss_function(loss)
    counts = {domain: 0 for domain in DOMAINS}
    for domain, samples in zip(DOMAINS, groups, strict=True):
        counts[domain] += sum(len(sample.behaviour) for sample in samples)
    total = torch.zeros((), dtype=torch.float64)
    for domain, samples in zip(DOMAINS, groups, strict=True):
        for sample in samples:
            own = logprobs(model, sample)
            if domain == "talks":
                total = total - 0.25 * own.sum() / counts[domain]
            else:
                value = sampled(own, sample_entries(sample, torch.float64)).loss.sum()
                total = total + 0.75 * value / counts[domain]
    total.backward()
    return float(total.detach()), taken(model)


def by_tree(
    model: nn.Module, groups: Sequence[Sequence[Sample]], loss: Loss, *, block: int | None
) -> tuple[float, dict[str, torch.Tensor], EntryValues]:
    forests = [
        read_tree(merge(samples, f"g-{n}"), is_supervised=domain == "talks")
        for n, (domain, samples) in enumerate(zip(DOMAINS, groups, strict=True))
    ]
    count = sum(forest.token_count for forest in forests)
    size = block or count
    blocks = tuple((start, min(start + size, count)) for start in range(0, count, size))
    weights = mixed_loss_weights(forests, domains=DOMAINS, fractions=FRACTIONS, loss=loss)
    values = forward_backward(
        prepare(model).policy,
        Objective(forests=forests, loss_weights=weights, loss=loss_function(loss)),
        [Microbatch(groups=(0, 1, 2), blocks=blocks)],
        head_chunk=8,
    )
    return values.loss, taken(model), values


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        Loss(),
        Loss(kind="gspo"),
        Loss(sequence_mask=SequenceMask(ratio="product", low=0.999, high=1.001)),
    ],
    ids=["cispo", "gspo", "masked"],
)
@given(seed=st.integers(0, 2**16))
@settings(max_examples=4, deadline=None)
def test_loss_and_gradients_on_trees_are_those_of_each_sample_alone(loss: Loss, seed: int) -> None:
    model, groups = exact_model(), groups_of(seed)
    expected_loss, expected = by_sample(model, groups, loss)
    for block in (None, 29):
        value, gradients, _ = by_tree(model, groups, loss, block=block)
        assert value == pytest.approx(expected_loss, rel=CLOSE)
        largest = max(float(each.abs().max()) for each in expected.values())
        for name, gradient in gradients.items():
            assert float((gradient - expected[name]).abs().max()) <= CLOSE * largest, name


def test_ratios_and_shares_are_over_sampled_entries_and_the_nll_over_given_ones() -> None:
    model, groups = exact_model(), groups_of(3)
    _, _, values = by_tree(model, groups, Loss(ratio_cap=1e-6), block=None)
    is_given = values.is_supervised_E
    metrics = entry_metrics(values)
    assert metrics.capped_share == 1.0
    assert not values.is_limited_E[is_given].any()
    assert (
        metrics.supervised_tokens
        == is_given.sum()
        == sum(len(sample.behaviour) for n in (0, 2) for sample in groups[n])
    )
    assert metrics.nll_supervised == pytest.approx(-values.logprob_E[is_given].mean())
    ratio = np.exp(values.logprob_E - values.behaviour_E)[~is_given]
    assert metrics.ratio_mean == pytest.approx(ratio.mean())
    assert (values_of(values_bytes(values)).is_supervised_E == is_given).all()


def test_a_step_of_given_replies_alone_has_no_ratio() -> None:
    values = EntryValues(
        logprob_E=np.array([-1.0, -3.0]),
        behaviour_E=np.array([-2.0, -2.0]),
        loss_E=np.array([1.0, 3.0]),
        is_limited_E=np.zeros(2, bool),
        entropy_E=np.ones(2),
        version_E=np.zeros(2, np.int64),
        reference_E=np.array([-9.0, -9.0]),
        is_supervised_E=np.ones(2, bool),
        loss=2.0,
    )
    metrics = entry_metrics(values)
    assert (metrics.nll_supervised, metrics.supervised_tokens, metrics.loss_tokens) == (2.0, 2, 2)
    assert (metrics.ratio_mean, metrics.kl_k3, metrics.kl_reference) == (0.0, 0.0, 0.0)


def test_given_entries_have_their_nll_whatever_the_loss_the_anchor_and_the_reference_are() -> None:
    logprob = torch.tensor([-0.5, -2.0], dtype=torch.float64, requires_grad=True)
    ones, zeros = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.long)
    entries = Entries(
        behaviour=-3 * ones,
        advantage=ones,
        temperature=ones,
        version=zeros,
        token=zeros,
        sample=zeros,
        group=zeros,
        sample_count=1,
        reference=-7 * ones,
        start=-4 * ones,
        is_supervised=torch.tensor([True, True]),
    )
    loss = Loss(kind="ppo_clip", anchor="step_start", reference_weight=2.0)
    result = loss_function(loss)(logprob, entries)
    assert result.loss.tolist() == [0.5, 2.0]
    assert torch.autograd.grad(result.loss.sum(), logprob)[0].tolist() == [-1.0, -1.0]


def test_each_kind_has_its_fraction_and_an_absent_kind_leaves_its_part_to_the_others() -> None:
    fractions = {"talks": 0.2, "notes": 0.3}
    assert loss_parts(["a", "talks", "b", "notes"], fractions) == [0.5, 0.2, 0.5, 0.3]
    assert loss_parts(["talks", "notes"], fractions) == pytest.approx([0.4, 0.6])
    assert loss_parts(["a", "notes", "a"], fractions) == pytest.approx([0.625, 0.375, 0.625])
    assert loss_parts(["a", "b"], fractions) == [1.0, 1.0]
    assert loss_parts(["talks"], fractions) == [1.0]


def test_without_a_supervised_domain_the_loss_weights_are_those_of_the_run() -> None:
    forests = [read_tree(merge(samples)) for samples in groups_of(1)]
    loss = Loss(normalisation="group")
    weights = mixed_loss_weights(forests, domains=("a", "b", "c"), fractions={}, loss=loss)
    assert weights == group_loss_weights(forests, loss=loss)


def test_a_trainer_supervises_the_groups_of_the_domain_and_reports_their_nll(
    tmp_path: Path,
) -> None:
    configuration = configuration_of(save_base(tmp_path / "base"))
    talks = Queue(
        domain="demo", task_source="", agent="", group_size=1, supervised=Supervised(fraction=1.0)
    )
    changed = msgspec.structs.replace(configuration, queues=(talks,))
    trees = [merge(samples, f"g-{n}") for n, samples in enumerate(groups_of(2)[::2])]
    scheduled = scheduled_step(0, trees)
    values = {tree.group_id: topics.encode(tree) for tree in trees}
    training = Training(changed, device="cpu", checkpoint=None)
    step = training.read(scheduled, values)
    assert not step.failed
    assert all(forest.entry_is_supervised_E.all() for forest in step.forests)
    metrics = training.train(step)
    assert metrics.supervised_tokens == metrics.loss_tokens > 0
    assert metrics.loss == pytest.approx(metrics.nll_supervised, rel=1e-5)
