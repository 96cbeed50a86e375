"""Losses as plain functions of loss entries.

An entry is one sampling event. Several may share a token of the tree; each has its own behaviour
log-probability and advantage, hence its own loss, and the losses are summed. `step.py` multiplies
each entry's loss by its group's loss weight, which is fixed before any backward.

r is exp(policy log-probability - behaviour log-probability), A the advantage, p the policy's
probability, sg stop-gradient. Sources: CISPO arXiv 2506.13585 eq. 4-5 with the absolute cap of
ScaleRL, arXiv 2510.13786; PPO arXiv 1707.06347 eq. 7, dual clip arXiv 1912.09729 eq. 5; GSPO
arXiv 2507.18071.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from forgemq_contracts.loss import LOSS_KINDS, Loss, SequenceMask


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """Loss entries of one or more whole groups; every tensor has E values.

    Attributes:
        behaviour: Log-probability recorded at sampling, nats.
        advantage: Of the entry's sample.
        temperature: Of sampling; the policy's logits are already divided by it.
        version: Weight version that sampled it.
        token: Layout index of the sampled token.
        sample: Index of the entry's sample, from 0; samples are contiguous.
        group: Index of the entry's group, from 0.
        sample_count: Number of samples, also those without entries.
        reference: Log-probability under a reference policy, nats, NaN if the entry has none; None
            if no entry has one.
        start: Log-probability under the policy at the step's beginning, nats, without gradient;
            None unless loss.anchor is step_start, and in a step of one update, which has no other
            policy.
        is_supervised: True for tokens of replies that were given and not sampled; None if no entry
            is of one. Their loss is `nll`, whatever the run's loss is.
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
    start: Tensor | None = None
    is_supervised: Tensor | None = None


@dataclass(frozen=True, slots=True)
class EntryLoss:
    """The loss of each entry, and whether the loss limited it.

    Attributes:
        loss: [E], differentiable in the policy's log-probabilities.
        is_limited: [E], True if a cap, clip or mask took hold.
    """

    loss: Tensor
    is_limited: Tensor


LOG_RATIO_MAX = 20.0
"""Log-ratios are cut here before they are raised, nats: e^20 is beyond every clip, and an infinite
ratio would make a gradient of 0 * inf. verl cuts at the same value."""

KL_MAX = 10.0
"""Largest k3 of one entry, nats: beyond it an entry adds no gradient, so that one token far from
the reference cannot take over the clipped norm of the step. verl cuts at the same value."""

LossFunction: TypeAlias = Callable[[Tensor, Entries], EntryLoss]
UserLoss: TypeAlias = Callable[[Tensor, Entries], Tensor]


def cispo(logprob: Tensor, entries: Entries, *, ratio_cap: float) -> EntryLoss:
    """-sg(min(r, cap)) A log p: r only scales the gradient, so the cap removes no entry."""
    ratio = _ratio(logprob, entries).detach()
    loss = -ratio.clamp(max=ratio_cap) * entries.advantage * logprob
    return EntryLoss(loss, ratio > ratio_cap)


def truncated_is(logprob: Tensor, entries: Entries, *, ratio_cap: float) -> EntryLoss:
    """-sg(min(r, cap)) A p / sg(p): truncated importance weights on the policy gradient.

    With one step after each forward, as here, its gradient is CISPO's; its value is minus the
    advantage times the capped ratio. It is not the TIS of verl and slime, which multiplies a PPO
    clip by a recomputed old policy over the behaviour.
    """
    ratio = _ratio(logprob, entries).detach()
    weight = ratio.clamp(max=ratio_cap)
    loss = -weight * entries.advantage * torch.exp(logprob - logprob.detach())
    return EntryLoss(loss, ratio > ratio_cap)


@dataclass(frozen=True, slots=True)
class Clip:
    """Where ppo_clip and gspo stop a step.

    Attributes:
        low: Ratios below 1 - low count as that.
        high: Ratios above 1 + high count as that.
        dual: At a negative advantage the loss is at most dual * |A|. The anchor is the engine's
            log-probability, several versions old, so large ratios there are normal.
    """

    low: float
    high: float
    dual: float


def ppo_clip(logprob: Tensor, entries: Entries, *, clip: Clip) -> EntryLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A), and at most dual |A| if A < 0."""
    return _clipped(_ratio(logprob, entries), entries.advantage, clip=clip)


def gspo(logprob: Tensor, entries: Entries, *, clip: Clip) -> EntryLoss:
    """As ppo_clip, with one ratio for each sample: the geometric mean of its entries' ratios.

    Differs from the paper: a sample counts by its length, as loss weights divide by entries.
    """
    log_ratio = logprob - entries.behaviour
    zeros = torch.zeros(entries.sample_count, dtype=logprob.dtype, device=logprob.device)
    totals = zeros.index_add(0, entries.sample, log_ratio)
    counts = zeros.index_add(0, entries.sample, torch.ones_like(log_ratio))
    mean = (totals / counts.clamp(min=1))[entries.sample]
    return _clipped(_exponential(mean), entries.advantage, clip=clip)


def icepop(logprob: Tensor, entries: Entries, *, mask_low: float, mask_high: float) -> EntryLoss:
    """-sg(r) A log p if r is in [low, high], else 0."""
    ratio = _ratio(logprob, entries).detach()
    is_masked = (ratio < mask_low) | (ratio > mask_high)
    weight = ratio.masked_fill(is_masked, 0.0)
    return EntryLoss(-weight * entries.advantage * logprob, is_masked)


def nll(logprob: Tensor, entries: Entries) -> EntryLoss:
    """-A log p: the negative log-likelihood where A is 1, as it is for replies that were given.

    With A of 1 and a loss weight of 1 / tokens it is the cross entropy of supervised training
    (InstructGPT, arXiv 2203.02155 section 3.1), in which prompts have no loss.
    """
    return EntryLoss(-entries.advantage * logprob, torch.zeros_like(logprob, dtype=torch.bool))


def with_supervised(loss: LossFunction) -> LossFunction:
    """The loss, but `nll` for entries of replies that were given.

    No ratio, cap, mask or KL to a reference has a part in it: nothing was sampled.
    """

    def mixed(logprob: Tensor, entries: Entries) -> EntryLoss:
        if entries.is_supervised is None:
            return loss(logprob, entries)
        given = nll(logprob, entries)
        if entries.is_supervised.all():
            return given
        result, is_given = loss(logprob, entries), entries.is_supervised
        return EntryLoss(
            torch.where(is_given, given.loss, result.loss), result.is_limited & ~is_given
        )

    return mixed


def decoupled(loss: LossFunction, *, weight_cap: float) -> LossFunction:
    """The loss with its ratio to the policy at the step's beginning, times sg(min(w, cap)).

    w = exp(start - behaviour) corrects for who sampled; the loss's own ratio is how far the step
    has gone. With ppo_clip it is the decoupled objective of three policies: AReaL, arXiv
    2505.24298, after Hilton et al., arXiv 2110.00641; the cap of w is from AReaL's code. In a step
    of one update it is the TIS of verl and slime.
    """

    def with_start(logprob: Tensor, entries: Entries) -> EntryLoss:
        start = _start(logprob, entries)
        weight = _exponential(start - entries.behaviour)
        result = loss(logprob, replace(entries, behaviour=start))
        is_limited = result.is_limited | (weight > weight_cap)
        return EntryLoss(weight.clamp(max=weight_cap) * result.loss, is_limited)

    return with_start


def masking_sequences(loss: LossFunction, mask: SequenceMask) -> LossFunction:
    """The loss, but 0 for all entries of a sample whose ratio is outside [low, high].

    The ratio compares the policy at the step's beginning with the behaviour if the loss is anchored
    there, so that all updates of a step mask the same samples; else the policy as it is.

    Sources: masked importance sampling with the geometric mean or the product of a sequence's
    ratios, Liu et al., "When Speed Kills Stability", 2025, and verl's rejection of rollouts; only
    at negative advantages: DeepSeek-V3.2, arXiv 2512.02556 section 3.1, with low = exp(-delta).
    """

    def masked(logprob: Tensor, entries: Entries) -> EntryLoss:
        result = loss(logprob, entries)
        is_masked = _is_outside(_start(logprob, entries) - entries.behaviour, entries, mask)
        if mask.advantages == "negative":
            is_masked = is_masked & (entries.advantage < 0)
        return EntryLoss(result.loss.masked_fill(is_masked, 0.0), result.is_limited | is_masked)

    return masked


def _is_outside(log_ratio: Tensor, entries: Entries, mask: SequenceMask) -> Tensor:
    """Whether the ratio of an entry's sample is outside the mask's bounds, [E]."""
    by_sample = log_ratio.new_zeros(entries.sample_count)
    counts = by_sample.index_add(0, entries.sample, torch.ones_like(log_ratio)).clamp(min=1)
    if mask.ratio == "arithmetic_mean":
        ratio = by_sample.index_add(0, entries.sample, _exponential(log_ratio)) / counts
    else:
        total = by_sample.index_add(0, entries.sample, log_ratio)
        ratio = _exponential(total if mask.ratio == "product" else total / counts)
    return ((ratio < mask.low) | (ratio > mask.high))[entries.sample]


def near_reference(loss: LossFunction, *, weight: float) -> LossFunction:
    """The loss plus weight * k3 of KL(policy || reference): x - 1 - log x, x = reference / policy.

    Source: GRPO, arXiv 2402.03300 eq. 4. Differs: at most KL_MAX an entry. Entries without a
    reference add 0.
    """

    def with_kl(logprob: Tensor, entries: Entries) -> EntryLoss:
        result = loss(logprob, entries)
        if entries.reference is None:
            return result
        # Without a reference log(policy / policy) = 0: no loss, and no gradient of NaN.
        log_ratio = torch.where(entries.reference.isnan(), logprob, entries.reference) - logprob
        log_ratio = log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
        kl = (torch.exp(log_ratio) - 1 - log_ratio).clamp(max=KL_MAX)
        return EntryLoss(result.loss + weight * kl, result.is_limited)

    return with_kl


def loss_function(settings: Loss, *, user: UserLoss | None = None) -> LossFunction:
    """The loss that a run's configuration names: anchored, masked and near its reference if asked.

    A mask takes nothing from the KL to the reference.

    Args:
        settings: The run's loss configuration.
        user: The function that a name `module:function` leads to: (policy log-probabilities [E],
            entries) -> losses [E].

    Raises:
        ValueError: the name is unknown, or the user's function is missing.
    """
    loss = _named_loss(settings, user=user)
    if settings.anchor == "step_start" and settings.kind in LOSS_KINDS:
        loss = decoupled(loss, weight_cap=settings.anchor_weight_cap)
    if settings.sequence_mask is not None:
        loss = masking_sequences(loss, settings.sequence_mask)
    weight = settings.reference_weight
    return with_supervised(near_reference(loss, weight=weight) if weight else loss)


def _named_loss(settings: Loss, *, user: UserLoss | None) -> LossFunction:
    clip = Clip(settings.clip_low, settings.clip_high, settings.clip_dual)
    known: dict[str, LossFunction] = {
        "cispo": partial(cispo, ratio_cap=settings.ratio_cap),
        "truncated_is": partial(truncated_is, ratio_cap=settings.ratio_cap),
        "ppo_clip": partial(ppo_clip, clip=clip),
        "gspo": partial(gspo, clip=clip),
        "icepop": partial(icepop, mask_low=settings.mask_low, mask_high=settings.mask_high),
    }
    if settings.kind in known:
        return known[settings.kind]
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

    return of_user


def _start(logprob: Tensor, entries: Entries) -> Tensor:
    """Log-probabilities under the policy at the step's beginning, without gradient."""
    return logprob.detach() if entries.start is None else entries.start


def _ratio(logprob: Tensor, entries: Entries) -> Tensor:
    return _exponential(logprob - entries.behaviour)


def _exponential(log_ratio: Tensor) -> Tensor:
    return torch.exp(log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX))


def _clipped(ratio: Tensor, advantage: Tensor, *, clip: Clip) -> EntryLoss:
    free = ratio * advantage
    clipped = torch.minimum(free, ratio.clamp(1 - clip.low, 1 + clip.high) * advantage)
    least = (clip.dual * advantage).masked_fill(advantage >= 0, -torch.inf)
    gain = torch.maximum(clipped, least)
    return EntryLoss(-gain, gain != free)
