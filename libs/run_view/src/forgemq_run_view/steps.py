"""Optimizer steps of the lineage that survives."""

from collections import Counter
from collections.abc import Iterable

from forgemq_contracts.groups import ScoredGroup
from forgemq_contracts.messages import Message
from forgemq_contracts.steps import ScheduledGroup, ScheduledStep, TrainedStep
from forgemq_run_view.state import StepAlarm, StepPoint, TrainedGroups


def surviving(steps: Iterable[TrainedStep]) -> dict[int, TrainedStep]:
    """The steps that the newest weights contain, by step number.

    A trainer that starts again raises the lineage and re-executes every step after its
    checkpoint, so of an older lineage only the steps below the newer one's first step survive.
    """
    by_lineage: dict[int, dict[int, TrainedStep]] = {}
    for step in steps:
        by_lineage.setdefault(step.lineage, {}).setdefault(step.step, step)
    kept: dict[int, TrainedStep] = {}
    limit: int | None = None
    for lineage in sorted(by_lineage, reverse=True):
        own = by_lineage[lineage]
        kept.update({k: own[k] for k in own if limit is None or k < limit})
        limit = min(own) if limit is None else min(limit, min(own))
    return dict(sorted(kept.items()))


GAP_SHARE = 0.99
"""Of the tokens have a log-probability gap of at most the quantile that is shown."""


class StepBook:
    """Steps as scheduled and as trained."""

    def __init__(self) -> None:
        self._scheduled: dict[int, ScheduledStep] = {}
        self._samples: dict[str, int] = {}
        self._trained: dict[tuple[int, int], tuple[TrainedStep, int]] = {}
        self._kept: dict[int, TrainedStep] | None = None

    def apply(self, message: Message) -> None:
        """Take in one record; records of other kinds are ignored."""
        match message.record:
            case ScheduledStep() as record:
                self._scheduled[record.step] = record
            case ScoredGroup() as record if not record.not_trainable:
                self._samples.setdefault(record.group_id, len(record.completions))
            case TrainedStep() as record:
                key = (record.step, record.lineage)
                self._trained.setdefault(key, (record, message.timestamp_ms))
                self._kept = None
            case _:
                pass

    def _surviving(self) -> dict[int, TrainedStep]:
        """The surviving steps, found once for each step that is trained."""
        if self._kept is None:
            self._kept = surviving(record for record, _ in self._trained.values())
        return self._kept

    def points(self) -> tuple[StepPoint, ...]:
        """One point for each surviving step, in order."""
        return tuple(
            _point(
                record,
                time_ms=self._trained[(record.step, record.lineage)][1],
                scheduled=self._scheduled.get(record.step),
                samples=sum(self._samples.get(group_id, 0) for group_id in record.group_ids),
            )
            for record in self._surviving().values()
        )

    def trained_groups(self) -> tuple[TrainedGroups, ...]:
        """Groups that surviving steps trained, by domain and staleness."""
        counted = Counter(
            (group.domain, group.staleness)
            for step in self._surviving()
            for group in self._groups_of(step)
        )
        return tuple(
            TrainedGroups(domain=domain, staleness=staleness, groups=groups)
            for (domain, staleness), groups in sorted(counted.items())
        )

    def staleness(self) -> dict[str, int]:
        """By domain, the largest staleness in the newest surviving step that trained any of it."""
        newest: dict[str, int] = {}
        for step in self._surviving():
            own: dict[str, int] = {}
            for group in self._groups_of(step):
                own[group.domain] = max(own.get(group.domain, 0), group.staleness)
            newest |= own
        return newest

    def _groups_of(self, step: int) -> tuple[ScheduledGroup, ...]:
        scheduled = self._scheduled.get(step)
        return scheduled.groups if scheduled else ()

    def alarms(self) -> tuple[StepAlarm, ...]:
        """The alarms of the surviving steps, in order."""
        return tuple(
            StepAlarm(
                step=record.step,
                lineage=record.lineage,
                metric=alarm.metric,
                value=alarm.value,
                threshold=alarm.threshold,
            )
            for record in self._surviving().values()
            for alarm in record.alarms
        )


def _policy_age(scheduled: ScheduledStep) -> float | None:
    """Mean staleness of the step's groups, weighted by their loss tokens."""
    tokens = sum(group.loss_tokens for group in scheduled.groups)
    if not tokens:
        return None
    return sum(group.staleness * group.loss_tokens for group in scheduled.groups) / tokens


def _point(
    record: TrainedStep, *, time_ms: int, scheduled: ScheduledStep | None, samples: int
) -> StepPoint:
    metrics = record.metrics
    gap = metrics.measured_gap()
    return StepPoint(
        step=record.step,
        lineage=record.lineage,
        time_ms=time_ms,
        loss=metrics.loss,
        grad_norm=metrics.grad_norm,
        lr=metrics.lr,
        loss_tokens=metrics.loss_tokens,
        tree_tokens=metrics.tree_tokens,
        request_tokens=metrics.request_tokens,
        append_tokens=metrics.append_tokens,
        attention_pairs=metrics.attention_pairs,
        staleness_max=metrics.staleness_max,
        staleness_bound=scheduled.staleness_bound if scheduled else None,
        logprob_gap_mean=gap.mean if gap else None,
        logprob_gap_p99=gap.quantile(GAP_SHARE) if gap else None,
        logprob_gap_max=gap.max if gap else None,
        gap_entries=gap.entries if gap else 0,
        kl_k3=metrics.kl_k3,
        entropy=metrics.entropy,
        capped_share=metrics.capped_share,
        ratio_p99=metrics.ratio_p99,
        duration_s=record.duration_s,
        samples=samples,
        policy_age=_policy_age(scheduled) if scheduled else None,
        nll_supervised=metrics.nll_supervised if metrics.supervised_tokens else None,
        kl_teacher=metrics.kl_teacher or None,  # Of a run without a teacher it is exactly 0.
    )
