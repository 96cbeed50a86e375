"""Optimizer steps of the lineage that survives."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter

from msgspec.structs import replace

from forgemq_contracts.groups import RetiredGroup, ScoredGroup
from forgemq_contracts.messages import Message
from forgemq_contracts.steps import ScheduledStep, TrainedStep
from forgemq_run_view.state import StepAlarm, StepPoint, TrainedGroups
from forgemq_run_view.step_samples import StepSamples


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


@dataclass(frozen=True, slots=True)
class _Plan:
    """Totals of a scheduled step."""

    staleness_bound: int
    policy_age: float | None
    groups: Counter[tuple[str, int]]  # by domain and staleness

    @classmethod
    def of(cls, scheduled: ScheduledStep) -> "_Plan":
        counted = Counter((group.domain, group.staleness) for group in scheduled.groups)
        return cls(scheduled.staleness_bound, _policy_age(scheduled), counted)


class StepBook:
    """Steps as scheduled and as trained, with totals of their groups.

    Of no step it keeps its groups one by one: a run has very many, and its state is asked for
    every second.
    """

    def __init__(self) -> None:
        self._plans: dict[int, _Plan] = {}
        self._samples = StepSamples()
        self._trained: dict[tuple[int, int], tuple[TrainedStep, int]] = {}
        self._kept: dict[int, TrainedStep] | None = None

    def apply(self, message: Message) -> None:
        """Take in one record; records of other kinds are ignored."""
        match message.record:
            case ScheduledStep() as record:
                self._plans[record.step] = _Plan.of(record)
            case ScoredGroup() as record if not record.not_trainable:
                self._samples.score(record)
            case TrainedStep() as record:
                self._samples.train(record)
                key = (record.step, record.lineage)
                kept = replace(record, group_ids=(), failed_group_ids=())
                self._trained.setdefault(key, (kept, message.timestamp_ms))
                self._kept = None
            case RetiredGroup() as record:
                self._samples.retire(record)
            case _:
                pass

    def _surviving(self) -> dict[int, TrainedStep]:
        """The surviving steps, found once for each step that is trained."""
        if self._kept is None:
            self._kept = surviving(record for record, _ in self._trained.values())
        return self._kept

    @property
    def count(self) -> int:
        """Surviving steps."""
        return len(self._surviving())

    def points(self) -> tuple[StepPoint, ...]:
        """One point for each surviving step, in order."""
        return tuple(
            _point(
                record,
                time_ms=self._trained[(record.step, record.lineage)][1],
                plan=self._plans.get(record.step),
                samples=self._samples.of(record.step),
            )
            for record in self._surviving().values()
        )

    def trained_groups(self) -> tuple[TrainedGroups, ...]:
        """Groups that surviving steps trained, by domain and staleness."""
        counted: Counter[tuple[str, int]] = Counter()
        for groups in self._groups():
            counted.update(groups)
        return tuple(
            TrainedGroups(domain=domain, staleness=staleness, groups=groups)
            for (domain, staleness), groups in sorted(counted.items())
        )

    def staleness(self) -> dict[str, int]:
        """By domain, the largest staleness in the newest surviving step that trained any of it."""
        newest: dict[str, int] = {}
        for groups in self._groups():
            # By staleness: the largest one of a domain comes last.
            newest |= dict(sorted(groups, key=itemgetter(1)))
        return newest

    def _groups(self) -> Iterator[Counter[tuple[str, int]]]:
        """The counts of each surviving step, in order."""
        plans = (self._plans.get(step) for step in self._surviving())
        return (plan.groups for plan in plans if plan)

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


def _point(record: TrainedStep, *, time_ms: int, plan: _Plan | None, samples: int) -> StepPoint:
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
        staleness_bound=plan.staleness_bound if plan else None,
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
        policy_age=plan.policy_age if plan else None,
        nll_supervised=metrics.nll_supervised if metrics.supervised_tokens else None,
        kl_teacher=metrics.kl_teacher or None,  # Of a run without a teacher it is exactly 0.
    )
