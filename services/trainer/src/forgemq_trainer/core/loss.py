"""Losses as plain functions of loss entries.

An entry is one sampling event. Several may share a token of the tree; the loss is taken for each
of them with its own behaviour log-probability and advantage, and only then summed. `step.py`
weighs each entry's loss by one denominator that is fixed before any backward.

r is exp(policy log-probability - behaviour log-probability). Sources: CISPO arXiv 2506.13585
eq. 4-5 with the absolute cap of ScaleRL, arXiv 2510.13786; GSPO arXiv 2507.18071.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from forgemq_contracts.run import Loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """Loss entries of one or more whole groups; every tensor has E values.

    Attributes:
        behaviour: log-probability recorded at sampling, nats.
        advantage: of the entry's sample.
        temperature: the sampling temperature, already divided out of the policy's logits.
        version: weight version that sampled it.
        token: tree index of the sampled token.
        sample: 0-based, contiguous.
        group: 0-based.
        sample_count: samples, with entries or not.
        reference: log-probability under a reference policy, nats, NaN where none was recorded;
            None where no group has any.
    """

    behaviour: Tensor
    advantage: Tensor
    temperature: Tensor
    version: Tensor
    token: Tensor
    sample: Tensor
    group: Tensor
    sample_count: int
    reference: Tensor | None = None


@dataclass(frozen=True, slots=True)
class EntryLoss:
    """What each entry costs, and whether the loss limited it.

    Attributes:
        loss: [E], differentiable in the policy's log-probabilities.
        is_limited: [E], True where a cap, clip or mask took hold.
    """

    loss: Tensor
    is_limited: Tensor


LossFunction: TypeAlias = Callable[[Tensor, Entries], EntryLoss]
UserLoss: TypeAlias = Callable[[Tensor, Entries], Tensor]


def cispo(logprob: Tensor, entries: Entries, *, ratio_cap: float) -> EntryLoss:
    """-sg(min(r, cap)) A log p: the ratio is a weight, so every entry keeps its gradient."""
    ratio = _ratio(logprob, entries).detach()
    loss = -ratio.clamp(max=ratio_cap) * entries.advantage * logprob
    return EntryLoss(loss, ratio > ratio_cap)


def tis(logprob: Tensor, entries: Entries, *, ratio_cap: float) -> EntryLoss:
    """-min(r0, cap) A p / sg(p): truncated importance sampling of the first on-policy step.

    Where one step follows each forward, as here, its gradient is CISPO's; its value is the
    negative of the weighted advantage.
    """
    ratio = _ratio(logprob, entries).detach()
    weight = ratio.clamp(max=ratio_cap)
    loss = -weight * entries.advantage * torch.exp(logprob - logprob.detach())
    return EntryLoss(loss, ratio > ratio_cap)


def ppo_clip(logprob: Tensor, entries: Entries, *, clip_low: float, clip_high: float) -> EntryLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A)."""
    return _clipped(_ratio(logprob, entries), entries.advantage, low=clip_low, high=clip_high)


def gspo(logprob: Tensor, entries: Entries, *, clip_low: float, clip_high: float) -> EntryLoss:
    """As ppo_clip, with one ratio for each sample: the geometric mean of its entries' ratios.

    Differs from the paper: samples count by their length, as the denominator counts entries.
    """
    log_ratio = logprob - entries.behaviour
    zeros = torch.zeros(entries.sample_count, dtype=logprob.dtype, device=logprob.device)
    totals = zeros.index_add(0, entries.sample, log_ratio)
    counts = zeros.index_add(0, entries.sample, torch.ones_like(log_ratio))
    ratio = torch.exp(totals / counts.clamp(min=1))[entries.sample]
    return _clipped(ratio, entries.advantage, low=clip_low, high=clip_high)


def icepop(logprob: Tensor, entries: Entries, *, mask_low: float, mask_high: float) -> EntryLoss:
    """-sg(r) A log p inside [low, high], nothing outside."""
    ratio = _ratio(logprob, entries).detach()
    is_masked = (ratio < mask_low) | (ratio > mask_high)
    weight = ratio.masked_fill(is_masked, 0.0)
    return EntryLoss(-weight * entries.advantage * logprob, is_masked)


def near_reference(loss: LossFunction, *, weight: float) -> LossFunction:
    """The loss plus weight * k3 of KL(policy || reference): x - 1 - log x, x = reference / policy.

    Source: GRPO, arXiv 2402.03300 eq. 4. Entries without a reference add nothing.
    """

    def with_kl(logprob: Tensor, entries: Entries) -> EntryLoss:
        result = loss(logprob, entries)
        if entries.reference is None:
            return result
        log_ratio = torch.where(entries.reference.isnan(), logprob, entries.reference) - logprob
        kl = torch.exp(log_ratio) - 1 - log_ratio
        return EntryLoss(result.loss + weight * kl, result.is_limited)

    return with_kl


def loss_function(settings: Loss, *, user: UserLoss | None = None) -> LossFunction:
    """The loss that a run's configuration names, near its reference where it has a weight.

    Args:
        settings: of the run.
        user: the function behind a `module:function` name: (policy log-probabilities [E],
            entries) -> losses [E].

    Raises:
        ValueError: the name is unknown, or the user's function is missing.
    """
    known: dict[str, LossFunction] = {
        "cispo": lambda logprob, entries: cispo(logprob, entries, ratio_cap=settings.ratio_cap),
        "tis": lambda logprob, entries: tis(logprob, entries, ratio_cap=settings.ratio_cap),
        "ppo_clip": lambda logprob, entries: ppo_clip(
            logprob, entries, clip_low=settings.clip_low, clip_high=settings.clip_high
        ),
        "gspo": lambda logprob, entries: gspo(
            logprob, entries, clip_low=settings.clip_low, clip_high=settings.clip_high
        ),
        "icepop": lambda logprob, entries: icepop(
            logprob, entries, mask_low=settings.mask_low, mask_high=settings.mask_high
        ),
    }
    if settings.kind in known:
        return _weighed(known[settings.kind], settings)
    if user is None:
        raise ValueError(
            f"loss.kind must be one of {', '.join(known)} or module:function, got {settings.kind}"
        )
    function = user

    def of_user(logprob: Tensor, entries: Entries) -> EntryLoss:
        loss = function(logprob, entries)
        if loss.shape != logprob.shape:
            raise ValueError(
                f"loss.kind {settings.kind} must return one loss for each of {len(logprob)} "
                f"entries, got shape {tuple(loss.shape)}"
            )
        return EntryLoss(loss, torch.zeros_like(logprob, dtype=torch.bool))

    return _weighed(of_user, settings)


def _weighed(loss: LossFunction, settings: Loss) -> LossFunction:
    weight = settings.reference_weight
    return near_reference(loss, weight=weight) if weight else loss


def _ratio(logprob: Tensor, entries: Entries) -> Tensor:
    return torch.exp(logprob - entries.behaviour)


def _clipped(ratio: Tensor, advantage: Tensor, *, low: float, high: float) -> EntryLoss:
    free = ratio * advantage
    clipped = ratio.clamp(1 - low, 1 + high) * advantage
    return EntryLoss(-torch.minimum(free, clipped), clipped < free)
