"""The report of a run: `report.json`, and what the closing table shows."""

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from forgemq_run_view.state import (
    AcceptancePoint,
    EffectiveYield,
    EvaluationPoint,
    ForkTotal,
    RunState,
    StepAlarm,
    Tally,
    UntrainedDomain,
)

Guarantee: TypeAlias = Literal["G1", "G2", "G3", "G4", "G5"]


class GuaranteeVerdict(Struct, frozen=True, kw_only=True):
    """Whether one guarantee held, what was checked, and what broke it."""

    name: Guarantee
    holds: bool
    checked: str
    violations: tuple[str, ...] = ()


class EvaluationResult(Struct, frozen=True, kw_only=True):
    """One evaluation round at one temperature; its versions are None if nothing was sampled."""

    round_name: str
    is_greedy: bool
    version_min: int | None
    version_max: int | None
    groups: int
    parts: Tally


class Report(Struct, frozen=True, kw_only=True):
    """How a run went. Success is the share of episodes with an outcome of at least 0.5.

    `merge_ratio_per_request` and `merge_ratio_append` are training tokens of one sample per
    request, and of append-only merging, over tree tokens; `merge_ratio_attention` is attention
    pairs of one sample per request over those of the trees. None: not measured.
    """

    run: str
    reason: str
    seed: int
    success_start: float | None
    success_end: float | None
    success_start_greedy: float | None
    success_end_greedy: float | None
    reward_parts_start: Tally | None
    reward_parts_end: Tally | None
    reward_parts_start_greedy: Tally | None
    reward_parts_end_greedy: Tally | None
    steps: int
    samples: int
    episodes: int
    episode_ends: dict[str, int] = {}
    forks: tuple[ForkTotal, ...] = ()
    completions: int
    tokens_generated: int
    tokens_trained: int
    merge_ratio_per_request: float | None
    merge_ratio_append: float | None
    merge_ratio_attention: float | None
    staleness_max: int
    staleness_bound: int
    groups_admitted: int
    groups_open: int
    groups_retired: dict[str, int]
    logprob_gap_max: float | None
    logprob_gap_mean: float | None
    logprob_gap_p99: Annotated[float | None, Meta(description="The largest one of a step.")]
    effective_yield: Annotated[
        EffectiveYield | None, Meta(description="None: of a build without it.")
    ] = None
    alarms: tuple[StepAlarm, ...]
    acceptance: tuple[AcceptancePoint, ...] = ()
    guarantees: dict[str, bool]
    guarantees_checked: tuple[GuaranteeVerdict, ...]
    evaluations: tuple[EvaluationResult, ...]
    imported: tuple[UntrainedDomain, ...] = ()
    live: tuple[UntrainedDomain, ...] = ()
    duration_s: float


class TrainedTrees(Struct, frozen=True):
    """Sums over trees.

    Attributes:
        samples: Completions in them.
        request_pairs: Attention pairs if each request were one training sample.
    """

    samples: int = 0
    request_pairs: int = 0


def report(
    state: RunState,
    *,
    trees: TrainedTrees,
    verdicts: Sequence[GuaranteeVerdict],
    duration_s: float,
    reason: str,
) -> Report:
    """The report of a run.

    Args:
        state: At the end of the run.
        trees: What the final weights were trained on, as far as an audit compared it.
        verdicts: One for each guarantee.
        duration_s: Time the run was up, over all its starts.
        reason: completed, interrupted or failed.
    """
    start, end = _outer(state, is_greedy=False)
    start_greedy, end_greedy = _outer(state, is_greedy=True)
    return Report(
        run=state.run,
        reason=reason,
        seed=state.seed,
        success_start=_success(start),
        success_end=_success(end),
        success_start_greedy=_success(start_greedy),
        success_end_greedy=_success(end_greedy),
        reward_parts_start=start,
        reward_parts_end=end,
        reward_parts_start_greedy=start_greedy,
        reward_parts_end_greedy=end_greedy,
        steps=state.steps_trained,
        samples=trees.samples,
        episodes=state.episodes_finished,
        episode_ends={each.end: each.episodes for each in state.episode_ends},
        forks=state.forks,
        completions=state.completions,
        tokens_generated=state.tokens_generated,
        tokens_trained=state.tokens_trained,
        merge_ratio_per_request=state.merge_ratio_per_request if state.points else None,
        merge_ratio_append=state.merge_ratio_append if state.points else None,
        merge_ratio_attention=_attention_ratio(state, trees),
        staleness_max=state.staleness_max,
        staleness_bound=max(queue.staleness_limit for queue in state.queues),
        groups_admitted=state.groups_admitted,
        groups_open=state.groups_open,
        groups_retired={each.reason: each.groups for each in state.retired},
        logprob_gap_max=state.logprob_gap_max,
        logprob_gap_mean=_gap_mean(state),
        logprob_gap_p99=_gap_p99(state),
        effective_yield=state.effective_yield,
        alarms=state.alarms,
        acceptance=state.acceptance,
        guarantees={verdict.name: verdict.holds for verdict in verdicts},
        guarantees_checked=tuple(verdicts),
        evaluations=tuple(_result(point) for point in state.evaluations),
        imported=state.imported,
        live=state.live,
        duration_s=duration_s,
    )


def _success(parts: Tally | None) -> float | None:
    return parts.success if parts else None


def _gap_p99(state: RunState) -> float | None:
    measured = (p.logprob_gap_p99 for p in state.points if p.logprob_gap_p99 is not None)
    return max(measured, default=None)


def _gap_mean(state: RunState) -> float | None:
    measured = [
        (point.logprob_gap_mean, point.gap_entries)
        for point in state.points
        if point.logprob_gap_mean is not None
    ]
    entries = sum(count for _, count in measured)
    return sum(mean * count for mean, count in measured) / entries if entries else None


def _attention_ratio(state: RunState, trees: TrainedTrees) -> float | None:
    pairs = sum(point.attention_pairs for point in state.points)
    return trees.request_pairs / pairs if trees.request_pairs and pairs else None


def _outer(state: RunState, *, is_greedy: bool) -> tuple[Tally | None, Tally | None]:
    """The evaluation of the base model and the newest of the final weights; None if not made.

    A round that later weights played too is neither; `Report.evaluations` has it with its versions.
    """
    rounds = [
        point
        for point in state.evaluations
        if point.is_greedy == is_greedy and point.tally.episodes
    ]
    start = [point for point in rounds if point.version_max == 0]
    end = [
        point for point in rounds if point.version_min and (point.version_max or 0) >= state.steps
    ]
    return (start[0].tally if start else None, end[-1].tally if end else None)


def _result(point: EvaluationPoint) -> EvaluationResult:
    return EvaluationResult(
        round_name=point.round_name,
        is_greedy=point.is_greedy,
        version_min=point.version_min,
        version_max=point.version_max,
        groups=point.groups,
        parts=point.tally,
    )
