"""Losses anchored at the step's beginning, and masks of whole completions, in closed form."""

import dataclasses
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from forgemq_contracts.loss import Loss, SequenceMask, check_loss
from forgemq_contracts.updates import Updates
from forgemq_trainer.core.loss import Entries, EntryLoss, loss_function
from forgemq_trainer.core.minibatches import minibatches
from forgemq_trainer.core.optimizer import Updater
from forgemq_trainer.core.precision import make_precise
from tests.unit.trainer.scene import make_model, merge, sample_entries, save_base, scheduled_step
from tests.unit.trainer.test_step_updates import (
    FOUR,
    OPTIMIZER,
    distance,
    exact_configuration,
    exact_model,
    groups_of,
    in_float64,
    request_logprob,
)

LOG_RATIOS = st.lists(st.floats(-3, 3), min_size=4, max_size=4)


def _entries(advantage: list[float], sample: list[int], start: list[float] | None) -> Entries:
    zeros = torch.zeros(len(sample), dtype=torch.long)
    return Entries(
        behaviour=torch.full((len(sample),), -2.0, dtype=torch.float64),
        advantage=torch.tensor(advantage, dtype=torch.float64),
        temperature=torch.ones(len(sample), dtype=torch.float64),
        version=zeros,
        token=zeros,
        sample=torch.tensor(sample),
        group=zeros,
        sample_count=max(sample) + 1,
        start=None if start is None else torch.tensor(start, dtype=torch.float64) - 2.0,
    )


def _result(
    settings: Loss,
    log_ratio: list[float],
    *,
    advantage: list[float],
    sample: list[int],
    start: list[float] | None = None,
) -> tuple[EntryLoss, Tensor]:
    """Losses and gradients of entries with these log-ratios to the behaviour."""
    logprob = (torch.tensor(log_ratio, dtype=torch.float64) - 2.0).requires_grad_()
    result = loss_function(settings)(logprob, _entries(advantage, sample, start))
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprob)
    return result, gradient


@pytest.mark.slow
@given(LOG_RATIOS, LOG_RATIOS, st.lists(st.floats(-2, 2), min_size=4, max_size=4))
def test_decoupled_ppo_is_the_objective_of_three_policies(
    now: list[float], start: list[float], advantage: list[float]
) -> None:
    """-min(w, 5) min(u A, clip(u, 0.8, 1.2) A) with w = start / behaviour, u = policy / start."""
    settings = Loss(kind="ppo_clip", anchor="step_start", clip_dual=1e9)
    result, _ = _result(settings, now, advantage=advantage, sample=[0, 0, 1, 1], start=start)
    for loss, log_now, log_start, a in zip(
        result.loss.tolist(), now, start, advantage, strict=True
    ):
        weight, u = min(math.exp(log_start), 5.0), math.exp(log_now - log_start)
        wanted = -weight * min(u * a, min(max(u, 0.8), 1.2) * a)
        assert loss == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    "kind",
    ["cispo", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("ppo_clip", "gspo"))],
)
@given(LOG_RATIOS)
def test_at_the_behaviour_itself_both_anchors_are_one(kind: str, now: list[float]) -> None:
    arguments = {"advantage": [1.0, -1.0, 0.5, 2.0], "sample": [0, 0, 1, 1]}
    plain, gradient = _result(Loss(kind=kind), now, **arguments)  # type: ignore[arg-type]
    anchored, same = _result(
        Loss(kind=kind, anchor="step_start"), now, start=[0.0] * 4, **arguments  # type: ignore[arg-type]
    )  # fmt: skip
    assert torch.allclose(plain.loss, anchored.loss, rtol=1e-12, atol=0)
    assert torch.allclose(gradient, same, rtol=1e-12, atol=0)


def test_in_a_step_of_one_update_the_clip_never_takes_hold_and_the_weight_corrects() -> None:
    """The TIS of verl and slime: u = 1, so the gradient is -min(w, cap) A."""
    settings = Loss(kind="ppo_clip", anchor="step_start", anchor_weight_cap=2.0)
    result, gradient = _result(
        settings, [0.0, math.log(1.5), math.log(9.0)], advantage=[1.0, -1.0, 1.0], sample=[0, 0, 1]
    )
    assert gradient.tolist() == pytest.approx([-1.0, 1.5, -2.0])
    assert result.is_limited.tolist() == [False, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ppo_clip", "cispo", "gspo"])
def test_anchored_updates_are_those_over_single_requests(tmp_path: Path, kind: str) -> None:
    """The start's log-probabilities are read once, from every request by itself."""
    base, loss = save_base(tmp_path / "base"), Loss(kind=kind, anchor="step_start")
    model, _ = in_float64(base, FOUR, loss)
    alone = make_model("qwen3", torch.float32).double()
    configuration = exact_configuration(base, FOUR, loss)
    alone.load_state_dict(exact_model(base, configuration).module.state_dict())
    alone.set_attn_implementation("sdpa")
    make_precise(alone)
    updater, function, groups = Updater(alone, OPTIMIZER), loss_function(loss), groups_of()
    trees = [merge(samples, f"g-{n}") for n, samples in enumerate(groups)]
    with torch.no_grad():
        start = {id(s): request_logprob(alone, s) for samples in groups for s in samples}
    for part in minibatches(scheduled_step(0, trees).groups, count=2) * 2:
        samples = [sample for group in part for sample in groups[group]]
        count = sum(len(sample.behaviour) for sample in samples)
        for sample in samples:
            entries = dataclasses.replace(
                sample_entries(sample, torch.float64), start=start[id(sample)]
            )
            (function(request_logprob(alone, sample), entries).loss.sum() / count).backward()
        updater.update(lr=OPTIMIZER.lr)
    assert distance(model, alone) < 1e-12
    plain, _ = in_float64(base, FOUR, Loss(kind=kind))
    assert distance(model, plain) > 1e-6, "the anchor changes the weights"


@given(LOG_RATIOS, st.sampled_from(["geometric_mean", "arithmetic_mean", "product"]))
def test_a_mask_takes_whole_samples_by_their_ratio_and_no_other(
    now: list[float], ratio: str
) -> None:
    mask = SequenceMask(ratio=ratio, low=0.5, high=2.0)  # type: ignore[arg-type]
    arguments = {"advantage": [1.0, 1.0, -1.0, -1.0], "sample": [0, 0, 1, 1]}
    plain, _ = _result(Loss(), now, **arguments)  # type: ignore[arg-type]
    masked, gradient = _result(Loss(sequence_mask=mask), now, **arguments)  # type: ignore[arg-type]
    for pair in ((0, 1), (2, 3)):
        ratios = np.exp([now[index] for index in pair])
        value = {
            "geometric_mean": float(np.sqrt(ratios.prod())),
            "arithmetic_mean": float(ratios.mean()),
            "product": float(ratios.prod()),
        }[ratio]
        if min(abs(value - 0.5), abs(value - 2.0)) < 1e-9:
            continue
        is_kept = 0.5 <= value <= 2.0
        for index in pair:
            assert masked.loss[index] == (plain.loss[index] if is_kept else 0.0)
            assert bool(gradient[index] != 0) == is_kept
            assert bool(masked.is_limited[index]) == (bool(plain.is_limited[index]) or not is_kept)


def test_a_mask_of_negative_advantages_leaves_the_others() -> None:
    mask = SequenceMask(low=0.5, high=2.0, advantages="negative")
    far = math.log(4.0)
    result, _ = _result(
        Loss(sequence_mask=mask), [far] * 4, advantage=[1.0, 1.0, -1.0, -1.0], sample=[0, 0, 1, 1]
    )
    assert (result.loss != 0).tolist() == [True, True, False, False]


def test_an_anchored_mask_keeps_its_samples_however_far_the_step_goes() -> None:
    """The start is within the bounds of one sample and outside those of the other."""
    settings = Loss(anchor="step_start", sequence_mask=SequenceMask())
    start = [0.1, 0.1, 1.0, 1.0]
    for moved in (0.0, 0.5, 2.0):
        now = [value + moved for value in start]
        result, _ = _result(settings, now, advantage=[1.0] * 4, sample=[0, 0, 1, 1], start=start)
        assert (result.loss != 0).tolist() == [True, True, False, False]


def test_masked_samples_count_in_what_the_losses_are_divided_by(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    nothing = Loss(sequence_mask=SequenceMask(low=1e8, high=1e9))
    model, taken = in_float64(base, Updates(), nothing)
    assert taken.values.loss == 0.0
    assert bool(taken.values.is_limited_E.all())
    untouched = exact_model(base, exact_configuration(base, Updates(), nothing)).module
    assert distance(model, untouched) == 0.0


@pytest.mark.parametrize("kind", ["truncated_is", "icepop"])
def test_a_loss_that_corrects_the_behaviour_itself_is_not_anchored_elsewhere(kind: str) -> None:
    check_loss(Loss(kind=kind))
    with pytest.raises(
        ValueError, match=rf"^loss\.anchor must be behaviour if loss\.kind is {kind}"
    ):
        check_loss(Loss(kind=kind, anchor="step_start"))


def test_a_mask_without_room_between_its_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^loss\.sequence_mask\.low must be below"):
        check_loss(Loss(sequence_mask=SequenceMask(low=2.0, high=2.0)))
    with pytest.raises(msgspec.ValidationError, match="ratio"):
        msgspec.convert({"ratio": "median"}, SequenceMask)
