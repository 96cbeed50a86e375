"""What one optimizer step measured, from the values of its entries.

r is policy / behaviour probability of an entry. The log-probability gap between trainer and engine
is taken over entries that the current version sampled: there both ran the same weights, so the gap
is numerical noise only. They are those of the step, and those of the probe (`core.probe`), without
which a step whose entries are all older would measure nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from forgemq_contracts.gaps import GAP_EDGES_NATS, LogprobGap
from forgemq_contracts.steps import ScheduledGroup, TrainingMetrics
from forgemq_trainer.core.flops import Savings
from forgemq_trainer.core.step import EntryValues
from forgemq_trainer.core.tree import Floats

RATIO_LOG_MAX = 60.0
"""Nats. Larger log ratios are reported as this: exp(60) is about 1e26, whose sum over a step is
finite; without the limit one entry could make a metric infinite, which JSON cannot carry."""

GAP_NATS_MAX = 1000.0
"""A gap that is no finite number is counted as this: worse than any that is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryMetrics:
    """Statistics over the loss entries of a step; zeros if it has no entries.

    Attributes:
        loss: Sum of the weighted losses.
        loss_tokens: Number of entries.
        ratio_mean: Mean of r.
        ratio_p99: 99th percentile of r.
        capped_share: Share of entries that the loss limited, 0..1.
        kl_k3: Mean of (r - 1) - log r, an estimate of KL(behaviour || policy), nats; the estimator
            k3 of J. Schulman, "Approximating KL Divergence", 2020.
        kl_reference: Mean of x - 1 - log x with x = reference / policy, an estimate of KL(policy ||
            reference), nats; 0 if no entry has a reference.
        entropy: Mean entropy of the policy at the entries, nats.
        supervised_tokens: Entries of replies that were given. No ratio, share and KL is over them.
        nll_supervised: Mean of -log p over these, nats; 0 without any.
    """

    loss: float
    loss_tokens: int
    ratio_mean: float
    ratio_p99: float
    capped_share: float
    kl_k3: float
    kl_reference: float
    entropy: float
    supervised_tokens: int = 0
    nll_supervised: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTotals:
    """Sums over the groups that were trained.

    Attributes:
        tree_tokens: Tokens of the trees.
        request_tokens: Tokens if every request were trained alone.
        append_tokens: Tokens if a request were merged only with the previous one that it extends.
        attention_pairs: Pairs of query and key that attention visits.
        staleness_max: Largest staleness of a group, in steps.
        route_disagreements: Entries whose recorded experts are not those the token ran through.
    """

    tree_tokens: int
    request_tokens: int
    append_tokens: int
    attention_pairs: int
    staleness_max: int
    route_disagreements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedUpdate:
    """What the optimizer did.

    Attributes:
        lr: Learning rate of the step.
        grad_norm: Norm of the gradient before clipping, mean of the updates; 0 if none was finite.
        skipped_in_a_row: Steps up to this one that changed no weight for that reason.
        updates: That changed the weights.
        updates_skipped: That did not, as their gradient was not finite.
    """

    lr: float
    grad_norm: float
    skipped_in_a_row: int
    updates: int = 1
    updates_skipped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftMeasures:
    """What an update of a draft head measured, before it.

    Attributes:
        rows: That trained, at the first depth.
        loss: Mean of the rows' losses, nats.
        grad_norm: Before clipping; 0 if it was not finite.
        overlap: Mean of the sum of min(p, q), 0..1.
    """

    rows: int
    loss: float
    grad_norm: float
    overlap: float


def of_all_updates(parts: Sequence[DraftMeasures]) -> DraftMeasures | None:
    """Means over the updates of a step, by rows but for the norm's; None without an update."""
    rows = sum(part.rows for part in parts)
    if not rows:
        return None
    return DraftMeasures(
        rows=rows,
        loss=sum(part.rows * part.loss for part in parts) / rows,
        grad_norm=sum(part.grad_norm for part in parts) / len(parts),
        overlap=sum(part.rows * part.overlap for part in parts) / rows,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured beside the entries' values.

    Attributes:
        gap: Between trainer and engine; None if no entry was of the current version.
        forward_backward_s: Time of the step's forward and backward.
        probe_s: Time of the probe's forward.
        draft: Of the draft head; None without one.
        kl_teacher: From the behaviour to the teacher, nats; 0 without one.
        idle_share: Of the plans; 0 on one rank.
    """

    gap: LogprobGap | None
    forward_backward_s: float
    probe_s: float
    draft: DraftMeasures | None = None
    kl_teacher: float = 0.0
    idle_share: float = 0.0


def step_gaps(values: EntryValues, *, version: int) -> Floats:
    """|trainer - engine| of the step's entries that this version sampled, nats."""
    gap_E = np.abs(values.logprob_E - values.behaviour_E)
    return np.asarray(gap_E[values.version_E == version])


def gap_of(gap_E: Floats) -> LogprobGap | None:
    """The gaps as the step's record has them; None if there is none."""
    if len(gap_E) == 0:
        return None
    gap_E = np.nan_to_num(gap_E, nan=GAP_NATS_MAX, posinf=GAP_NATS_MAX)
    counts = np.bincount(np.searchsorted(GAP_EDGES_NATS, gap_E))
    return LogprobGap(
        entries=len(gap_E),
        mean=float(gap_E.mean()),
        max=float(gap_E.max()),
        bins=tuple(counts.tolist()),
    )


def entry_metrics(values: EntryValues, *, passes: int = 1) -> EntryMetrics:
    """Statistics of a step's entries, those of all ranks, over all of its updates.

    Args:
        values: With each entry as often as it trained.
        passes: How often that is.
    """
    count = len(values.logprob_E)
    if count == 0:
        return EntryMetrics(
            loss=values.loss,
            loss_tokens=0,
            ratio_mean=0.0,
            ratio_p99=0.0,
            capped_share=0.0,
            kl_k3=0.0,
            kl_reference=0.0,
            entropy=0.0,
        )
    is_sampled_E = ~values.is_supervised_E
    given_E = values.logprob_E[values.is_supervised_E]
    log_ratio = (values.logprob_E - values.behaviour_E)[is_sampled_E]
    log_ratio = np.clip(log_ratio, -RATIO_LOG_MAX, RATIO_LOG_MAX)
    ratio = np.exp(log_ratio)
    is_any = len(ratio) > 0
    return EntryMetrics(
        loss=values.loss,
        loss_tokens=count // passes,
        ratio_mean=float(ratio.mean()) if is_any else 0.0,
        ratio_p99=float(np.percentile(ratio, 99)) if is_any else 0.0,
        capped_share=float(values.is_limited_E[is_sampled_E].mean()) if is_any else 0.0,
        kl_k3=float((ratio - 1 - log_ratio).mean()) if is_any else 0.0,
        kl_reference=_kl_reference(values),
        entropy=float(values.entropy_E.mean()),
        supervised_tokens=len(given_E) // passes,
        nll_supervised=-float(given_E.mean()) if len(given_E) else 0.0,
    )


def _kl_reference(values: EntryValues) -> float:
    has_one = ~np.isnan(values.reference_E) & ~values.is_supervised_E
    log_ratio = (values.reference_E - values.logprob_E)[has_one]
    log_ratio = np.clip(log_ratio, -RATIO_LOG_MAX, RATIO_LOG_MAX)
    return float((np.exp(log_ratio) - 1 - log_ratio).mean()) if len(log_ratio) else 0.0


def group_totals(groups: tuple[ScheduledGroup, ...], *, route_disagreements: int) -> GroupTotals:
    """Sums over these groups, as the scheduler recorded them."""
    return GroupTotals(
        tree_tokens=sum(group.tree_tokens for group in groups),
        request_tokens=sum(group.request_tokens for group in groups),
        append_tokens=sum(group.append_tokens for group in groups),
        attention_pairs=sum(group.attention_pairs for group in groups),
        staleness_max=max((group.staleness for group in groups), default=0),
        route_disagreements=route_disagreements,
    )


def training_metrics(
    entries: EntryMetrics,
    totals: GroupTotals,
    saved: Savings,
    *,
    update: AppliedUpdate,
    measured: Measured,
) -> TrainingMetrics:
    """The step's metrics in the form of its TrainedStep record: all finite, 0 for what is not.

    JSON has no other numbers, and a checkpoint that names one would not read back. A step with a
    number that is not finite has changed no weight, and `skipped_in_a_row` says so.
    """
    gap, draft = measured.gap, measured.draft
    metrics = TrainingMetrics(
        loss=entries.loss,
        grad_norm=update.grad_norm,
        lr=update.lr,
        loss_tokens=entries.loss_tokens,
        tree_tokens=totals.tree_tokens,
        request_tokens=totals.request_tokens,
        append_tokens=totals.append_tokens,
        attention_pairs=totals.attention_pairs,
        ratio_mean=entries.ratio_mean,
        ratio_p99=entries.ratio_p99,
        capped_share=entries.capped_share,
        logprob_gap_mean=gap.mean if gap else 0.0,
        logprob_gap_max=gap.max if gap else 0.0,
        kl_k3=entries.kl_k3,
        entropy=entries.entropy,
        staleness_max=totals.staleness_max,
        forward_backward_s=measured.forward_backward_s,
        gap_entries=gap.entries if gap else 0,
        branch_loss=saved.branch_loss,
        flop_ratio=saved.flop_ratio,
        flop_ratio_weights=saved.flop_ratio_weights,
        flop_ratio_attention=saved.flop_ratio_attention,
        route_disagreements=totals.route_disagreements,
        kl_reference=entries.kl_reference,
        skipped_in_a_row=update.skipped_in_a_row,
        kl_teacher=measured.kl_teacher,
        idle_share=measured.idle_share,
        updates=update.updates,
        updates_skipped=update.updates_skipped,
        supervised_tokens=entries.supervised_tokens,
        nll_supervised=entries.nll_supervised,
        logprob_gap=gap,
        probe_s=measured.probe_s,
    )
    if draft is not None:
        metrics = _with_draft(metrics, draft)
    values = msgspec.structs.asdict(metrics).items()
    floats = ((name, value) for name, value in values if isinstance(value, float))
    return msgspec.structs.replace(
        metrics, **{name: 0.0 for name, value in floats if not math.isfinite(value)}
    )


def _with_draft(metrics: TrainingMetrics, draft: DraftMeasures) -> TrainingMetrics:
    """The metrics with those of a draft head, which a record of a run without one does not name."""
    return msgspec.structs.replace(
        metrics,
        draft_loss=draft.loss,
        draft_grad_norm=draft.grad_norm,
        draft_overlap=draft.overlap,
    )
