"""Makes a graded episode of what graders returned and what the agent reported."""

import math
from collections.abc import Sequence

from msgspec import Struct

from forgemq_contracts.episodes import (
    FinishedEpisode,
    GradedEpisode,
    ProcessReward,
    ReportedReward,
)
from forgemq_contracts.fields import NamedValue
from forgemq_contracts.grading import GradingCompletion
from forgemq_reward.core.bounds import reward_fault

DETAIL_CHARACTERS_MAX = 500
"""Of a grader's error: user code may raise with a text of any length."""


class Verdict(Struct, frozen=True, kw_only=True):
    """What the user's functions returned; None if the run names no such function.

    With an `error` the episode is masked; it does not get a reward of zero.
    """

    outcome: float | None = None
    speed: float | None = None
    process: tuple[float, ...] | None = None
    error: str = ""


def graded_episode(
    episode: FinishedEpisode,
    verdict: Verdict,
    *,
    grader: str,
    grader_version: str,
    completions: Sequence[GradingCompletion] = (),
) -> GradedEpisode:
    """The grade of a completed episode.

    A part without a function is what the agent reported: rewards named `outcome` and `speed` for
    the episode, and every reward that names a completion.

    `completions` are as the graders saw them; () without a grader or a transcript.
    """
    order = [entry.completion_id for entry in sorted(episode.manifest, key=lambda e: e.sequence)]
    reported = episode.rewards
    process = _process(verdict, order=order, reported=reported)
    outcome = _values(verdict.outcome, reported=reported, name="outcome")
    speed = _values(verdict.speed, reported=reported, name="speed")
    detail = (
        verdict.error
        or _process_fault(process, verdict=verdict, order=order)
        or _fault("the outcome", outcome)
        or _fault("the speed", speed)
    )
    return GradedEpisode(
        episode_id=episode.episode_id,
        group_id=episode.group_id,
        grader=grader,
        grader_version=grader_version,
        outcome=0.0 if detail else math.fsum(outcome),
        speed=0.0 if detail else math.fsum(speed),
        process=() if detail else process,
        is_masked=bool(detail),
        detail=detail[:DETAIL_CHARACTERS_MAX],
        metrics=_metrics(episode, completions),
    )


def _process(
    verdict: Verdict, *, order: Sequence[str], reported: Sequence[ReportedReward]
) -> tuple[ProcessReward, ...]:
    if verdict.process is not None:
        pairs = list(zip(order, verdict.process, strict=False))
    else:
        pairs = [(r.completion_id, r.value) for r in reported if r.completion_id is not None]
    return tuple(
        ProcessReward(completion_id=completion_id, value=value) for completion_id, value in pairs
    )


def _values(
    returned: float | None, *, reported: Sequence[ReportedReward], name: str
) -> list[float]:
    """The values that add up to this reward of the whole episode."""
    if returned is not None:
        return [returned]
    return [r.value for r in reported if r.name == name and r.completion_id is None]


def _fault(name: str, values: Sequence[float]) -> str:
    """Why these values do not add up to a reward; "" if they do.

    Each value is checked before their sum: a sum of any float64 may overflow.
    """
    faults = (reward_fault(name, value) for value in values)
    return next(filter(None, faults), "") or reward_fault(name, math.fsum(values))


def _process_fault(
    process: Sequence[ProcessReward], *, verdict: Verdict, order: Sequence[str]
) -> str:
    """Why these cannot be process rewards of the episode; "" if they can."""
    if verdict.process is not None and len(verdict.process) != len(order):
        return (
            f"process returned {len(verdict.process)} values for {len(order)} completions: "
            "it must return one per completion, in their order"
        )
    known = set(order)
    for reward in process:
        name = f"the process reward of {reward.completion_id}"
        if fault := reward_fault(name, reward.value):
            return fault
        if reward.completion_id not in known:
            return f"a reward names completion {reward.completion_id}, which did not count"
    return ""


def _metrics(
    episode: FinishedEpisode, completions: Sequence[GradingCompletion]
) -> tuple[NamedValue, ...]:
    """Numbers of the episode that reports and the console show."""
    values = {
        "turns": float(len(episode.manifest)),
        "output_tokens": float(sum(entry.output_tokens for entry in episode.manifest)),
        "duration_s": episode.duration_s,
        "engine_s": episode.engine_s,
        "tool_s": episode.tool_s,
    }
    if episode.alone_s is not None:
        values["alone_s"] = episode.alone_s
    if episode.virtual_s is not None:
        values["virtual_s"] = episode.virtual_s
    if completions:
        calls = [len(completion.message.get("tool_calls") or ()) for completion in completions]
        values["tool_calls"] = float(sum(calls))
        values["calling_turns"] = float(sum(count > 0 for count in calls))
        values["parallel_turns"] = float(sum(count > 1 for count in calls))
        values["malformed_tool_calls"] = float(sum(c.malformed_tool_calls for c in completions))
    return tuple(NamedValue(name=name, value=value) for name, value in values.items())
