"""Losses in closed form on entries small enough to check by hand."""

import dataclasses
import math

import pytest
import torch

from forgemq_contracts.loss import LOSS_KINDS, Loss
from forgemq_trainer.core.loss import Entries, EntryLoss, loss_function


def _entries(behaviour: list[float], advantage: list[float], sample: list[int]) -> Entries:
    zeros = torch.zeros(len(behaviour), dtype=torch.long)
    return Entries(
        behaviour=torch.tensor(behaviour, dtype=torch.float64),
        advantage=torch.tensor(advantage, dtype=torch.float64),
        temperature=torch.ones(len(behaviour), dtype=torch.float64),
        version=zeros,
        token=zeros,
        sample=torch.tensor(sample),
        group=zeros,
        sample_count=max(sample) + 1,
    )


def _result(
    settings: Loss, ratios: list[float], advantage: list[float], sample: list[int]
) -> tuple[list[float], list[float], list[bool], list[float]]:
    """Loss, gradient and limits for entries with these ratios and behaviour -2."""
    behaviour = [-2.0] * len(ratios)
    logprob = torch.tensor([-2 + math.log(r) for r in ratios], dtype=torch.float64)
    logprob.requires_grad_()
    result = loss_function(settings)(logprob, _entries(behaviour, advantage, sample))
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprob)
    return result.loss.tolist(), gradient.tolist(), result.is_limited.tolist(), logprob.tolist()


def test_cispo_caps_the_ratio_and_keeps_every_gradient() -> None:
    loss, gradient, limited, logprob = _result(
        Loss(ratio_cap=5.0), [0.01, 1.0, 4.0, 50.0], [1.0, 2.0, -1.0, 3.0], [0, 0, 1, 1]
    )
    weights = [0.01, 1.0, 4.0, 5.0]
    advantages = [1.0, 2.0, -1.0, 3.0]
    assert gradient == pytest.approx([-w * a for w, a in zip(weights, advantages, strict=True)])
    assert loss == pytest.approx(
        [-w * a * p for w, a, p in zip(weights, advantages, logprob, strict=True)]
    )
    assert limited == [False, False, False, True]


def test_truncated_is_has_cispos_gradient_and_another_value() -> None:
    settings = Loss(kind="truncated_is", ratio_cap=2.0)
    loss, gradient, limited, _ = _result(settings, [0.5, 3.0], [1.0, -2.0], [0, 1])
    assert loss == pytest.approx([-0.5, 4.0])
    assert gradient == pytest.approx([-0.5, 4.0])
    assert limited == [False, True]


def test_ppo_clip_stops_the_gradient_only_if_the_step_went_too_far() -> None:
    settings = Loss(kind="ppo_clip", clip_low=0.2, clip_high=0.3)
    loss, gradient, limited, _ = _result(
        settings, [1.5, 1.5, 0.5, 0.5, 1.0], [1.0, -1.0, 1.0, -1.0, 2.0], [0, 0, 0, 0, 0]
    )
    assert loss == pytest.approx([-1.3, 1.5, -0.5, 0.8, -2.0])
    assert gradient == pytest.approx([0.0, 1.5, -0.5, 0.0, -2.0])
    assert limited == [True, False, False, True, False]


@pytest.mark.parametrize("kind", ["ppo_clip", "gspo"])
def test_a_ratio_far_off_at_a_negative_advantage_costs_at_most_the_dual_clip(kind: str) -> None:
    """c = 3: beyond it neither loss nor gradient grows; a positive advantage is clipped already."""
    settings = Loss(kind=kind, clip_dual=3.0)
    ratios, samples = [2.9, 3.1, math.exp(90.0), math.exp(90.0)], [0, 1, 2, 3]
    loss, gradient, limited, _ = _result(settings, ratios, [-2.0, -2.0, -2.0, 1.0], samples)
    assert loss == pytest.approx([5.8, 6.0, 6.0, -1.2])
    assert gradient == pytest.approx([5.8, 0.0, 0.0, 0.0])
    assert limited == [False, True, True, True]


@pytest.mark.parametrize("kind", LOSS_KINDS)
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_no_ratio_gives_a_loss_or_a_gradient_that_is_not_finite(
    kind: str, advantage: float
) -> None:
    for log_ratio in (-900.0, -95.0, 95.0, 900.0):
        behaviour = min(0.0, -log_ratio) - 1.0
        logprob = torch.tensor([behaviour + log_ratio], dtype=torch.float32, requires_grad=True)
        entries = dataclasses.replace(
            _entries([behaviour], [advantage], [0]),
            behaviour=torch.tensor([behaviour]),
            advantage=torch.tensor([advantage]),
            reference=torch.tensor([-1.0]),
        )
        result = loss_function(Loss(kind=kind, reference_weight=0.1))(logprob, entries)
        (gradient,) = torch.autograd.grad(result.loss.sum(), logprob)
        assert bool(result.loss.isfinite().all()), log_ratio
        assert bool(gradient.isfinite().all()), log_ratio


def test_one_token_far_from_the_reference_adds_a_bounded_loss_and_no_gradient() -> None:
    """k3 of 15 nats is 3.3e6; it counts as 10."""
    entries = dataclasses.replace(
        _entries([-2.0, -2.0], [0.0, 0.0], [0, 1]),
        reference=torch.tensor([-1.0, -1.0], dtype=torch.float64),
    )
    logprob = torch.tensor([-16.0, -2.0], dtype=torch.float64, requires_grad=True)
    result = loss_function(Loss(reference_weight=0.5))(logprob, entries)
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprob)
    assert result.loss.tolist() == pytest.approx([5.0, 0.5 * (math.e - 2)])
    assert gradient.tolist() == pytest.approx([0.0, 0.5 * (1 - math.e)])


def test_gspo_uses_the_geometric_mean_of_a_samples_ratios() -> None:
    settings = Loss(kind="gspo", clip_low=0.2, clip_high=0.2)
    loss, gradient, limited, _ = _result(
        settings, [2.0, 0.5, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0], [0, 0, 1, 1]
    )
    assert loss == pytest.approx([-1.0, -1.0, -1.2, -1.2])
    assert gradient == pytest.approx([-1.0, -1.0, 0.0, 0.0])
    assert limited == [False, False, True, True]


def test_icepop_masks_ratios_outside_the_band() -> None:
    settings = Loss(kind="icepop", mask_low=0.5, mask_high=2.0)
    _, gradient, limited, _ = _result(settings, [0.4, 0.6, 1.9, 2.1], [1.0] * 4, [0] * 4)
    assert gradient == pytest.approx([0.0, -0.6, -1.9, 0.0])
    assert limited == [True, False, False, True]


def test_a_users_loss_is_a_plain_function_on_entries() -> None:
    def reinforce(logprob: torch.Tensor, entries: Entries) -> torch.Tensor:
        return -entries.advantage * logprob

    function = loss_function(Loss(kind="mine:reinforce"), user=reinforce)
    entries = _entries([-1.0, -1.0], [2.0, -1.0], [0, 1])
    result = function(torch.tensor([-3.0, -4.0], dtype=torch.float64), entries)
    assert isinstance(result, EntryLoss)
    assert result.loss.tolist() == [6.0, -4.0]
    assert result.is_limited.tolist() == [False, False]


def test_a_users_loss_must_give_one_value_for_each_entry() -> None:
    function = loss_function(Loss(kind="mine:total"), user=lambda logprob, _: logprob.sum())
    with pytest.raises(ValueError, match=r"mine:total must return one loss for each of 2"):
        function(torch.zeros(2), _entries([-1.0, -1.0], [1.0, 1.0], [0, 0]))


def test_an_unknown_loss_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"loss\.kind must be one of cispo.*got grpo"):
        loss_function(Loss(kind="grpo"))
