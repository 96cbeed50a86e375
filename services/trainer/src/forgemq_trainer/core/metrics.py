"""What one optimizer step measured, from the values of its entries.

r is policy / behaviour probability of an entry. The log-probability gap between trainer and engine
is taken over the entries that the current version sampled: there both ran the same weights, so the
gap is numerical noise and nothing else.
"""

from dataclasses import dataclass

import numpy as np

from forgemq_contracts.steps import ScheduledGroup, TrainingMetrics
from forgemq_trainer.core.flops import Savings
from forgemq_trainer.core.step import EntryValues

RATIO_LOG_MAX = 60.0
"""Ratios beyond e^60 are reported as that: a metric shall stay a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryMetrics:
    """Statistics over the loss entries of a step; zeros where it has none.

    Attributes:
        ratio_mean: mean of r.
        ratio_p99: 99th percentile of r.
        capped_share: entries that the loss limited.
        kl_k3: mean of (r - 1) - log r, an estimate of KL(behaviour || policy), nats.
        kl_reference: mean of x - 1 - log x of x = reference / policy, an estimate of KL(policy ||
            reference), nats; 0 where no entry has a reference.
        entropy: mean entropy of the policy where entries were sampled, nats.
        gap_mean: mean |log-probability of the trainer - of the engine| on the current version.
        gap_max: largest of them.
        gap_entries: how many they were.
    """

    ratio_mean: float
    ratio_p99: float
    capped_share: float
    kl_k3: float
    kl_reference: float
    entropy: float
    gap_mean: float
    gap_max: float
    gap_entries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTotals:
    """Sums over the groups that were trained; tokens and pairs, staleness in steps."""

    tree_tokens: int
    request_tokens: int
    append_tokens: int
    attention_pairs: int
    staleness_max: int


def entry_metrics(values: EntryValues, *, current_version: int) -> EntryMetrics:
    """Statistics of a step's entries.

    Args:
        values: of all ranks.
        current_version: of the weights that computed them.
    """
    count = len(values.logprob_E)
    if count == 0:
        return EntryMetrics(
            ratio_mean=0.0,
            ratio_p99=0.0,
            capped_share=0.0,
            kl_k3=0.0,
            kl_reference=0.0,
            entropy=0.0,
            gap_mean=0.0,
            gap_max=0.0,
            gap_entries=0,
        )
    log_ratio = np.clip(values.logprob_E - values.behaviour_E, -RATIO_LOG_MAX, RATIO_LOG_MAX)
    ratio = np.exp(log_ratio)
    is_current = values.version_E == current_version
    gap = np.abs(values.logprob_E - values.behaviour_E)[is_current]
    return EntryMetrics(
        ratio_mean=float(ratio.mean()),
        ratio_p99=float(np.percentile(ratio, 99)),
        capped_share=float(values.is_limited_E.mean()),
        kl_k3=float((ratio - 1 - log_ratio).mean()),
        kl_reference=_kl_reference(values),
        entropy=float(values.entropy_E.mean()),
        gap_mean=float(gap.mean()) if len(gap) else 0.0,
        gap_max=float(gap.max()) if len(gap) else 0.0,
        gap_entries=len(gap),
    )


def _kl_reference(values: EntryValues) -> float:
    has_one = ~np.isnan(values.reference_E)
    log_ratio = (values.reference_E - values.logprob_E)[has_one]
    log_ratio = np.clip(log_ratio, -RATIO_LOG_MAX, RATIO_LOG_MAX)
    return float((np.exp(log_ratio) - 1 - log_ratio).mean()) if len(log_ratio) else 0.0


def group_totals(groups: tuple[ScheduledGroup, ...]) -> GroupTotals:
    """Sums over these groups, as the scheduler recorded them."""
    return GroupTotals(
        tree_tokens=sum(group.tree_tokens for group in groups),
        request_tokens=sum(group.request_tokens for group in groups),
        append_tokens=sum(group.append_tokens for group in groups),
        attention_pairs=sum(group.attention_pairs for group in groups),
        staleness_max=max((group.staleness for group in groups), default=0),
    )


def training_metrics(
    entries: EntryMetrics,
    totals: GroupTotals,
    *,
    loss: float,
    loss_tokens: int,
    grad_norm: float,
    lr: float,
    forward_backward_s: float,
    saved: Savings,
    route_disagreements: int,
) -> TrainingMetrics:
    """The step's metrics as they travel."""
    return TrainingMetrics(
        loss=loss,
        grad_norm=grad_norm,
        lr=lr,
        loss_tokens=loss_tokens,
        tree_tokens=totals.tree_tokens,
        request_tokens=totals.request_tokens,
        append_tokens=totals.append_tokens,
        attention_pairs=totals.attention_pairs,
        ratio_mean=entries.ratio_mean,
        ratio_p99=entries.ratio_p99,
        capped_share=entries.capped_share,
        logprob_gap_mean=entries.gap_mean,
        logprob_gap_max=entries.gap_max,
        kl_k3=entries.kl_k3,
        entropy=entries.entropy,
        staleness_max=totals.staleness_max,
        forward_backward_s=forward_backward_s,
        gap_entries=entries.gap_entries,
        branch_loss=saved.branch_loss,
        flop_ratio=saved.flop_ratio,
        flop_ratio_weights=saved.flop_ratio_weights,
        flop_ratio_attention=saved.flop_ratio_attention,
        route_disagreements=route_disagreements,
        kl_reference=entries.kl_reference,
    )
