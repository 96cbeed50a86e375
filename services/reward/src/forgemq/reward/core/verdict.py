"""From what graders returned, and what the agent reported, to a graded episode."""

import math
from collections.abc import Sequence

from msgspec import Struct

from forgemq.contracts.episodes import (
    FinishedEpisode,
    GradedEpisode,
    ProcessReward,
    ReportedReward,
)
from forgemq.contracts.fields import NamedValue
from forgemq.contracts.grading import GradingCompletion

DETAIL_CHARACTERS_MAX = 500


class Verdict(Struct, frozen=True, kw_only=True):
    """What the user's functions returned; None: the run names no such function.

    With an `error` no part counts: the episode is masked, it never gets a reward of zero.
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

    `completions` are as the graders saw them; () where there was no grader or no transcript.
    """
    order = [entry.completion_id for entry in sorted(episode.manifest, key=lambda e: e.sequence)]
    reported = episode.rewards
    process = _process(verdict, order=order, reported=reported)
    outcome = _reported(reported, "outcome") if verdict.outcome is None else verdict.outcome
    speed = _reported(reported, "speed") if verdict.speed is None else verdict.speed
    detail = verdict.error or _fault(
        outcome=outcome, speed=speed, process=process, verdict=verdict, order=order
    )
    return GradedEpisode(
        episode_id=episode.episode_id,
        group_id=episode.group_id,
        grader=grader,
        grader_version=grader_version,
        outcome=0.0 if detail else outcome,
        speed=0.0 if detail else speed,
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


def _reported(rewards: Sequence[ReportedReward], name: str) -> float:
    return math.fsum(r.value for r in rewards if r.name == name and r.completion_id is None)


def _fault(
    *,
    outcome: float,
    speed: float,
    process: Sequence[ProcessReward],
    verdict: Verdict,
    order: Sequence[str],
) -> str:
    """Why these values are no grade; '' where they are one."""
    if verdict.process is not None and len(verdict.process) != len(order):
        return (
            f"process returned {len(verdict.process)} values for {len(order)} completions: "
            "it must return one per completion, in their order"
        )
    if not math.isfinite(outcome):
        return f"the outcome must be finite, got {outcome}"
    if not math.isfinite(speed):
        return f"the speed must be finite, got {speed}"
    known = set(order)
    for reward in process:
        if not math.isfinite(reward.value):
            return f"process rewards must be finite, got {reward.value} for {reward.completion_id}"
        if reward.completion_id not in known:
            return f"a reward names completion {reward.completion_id}, which did not count"
    return ""


def _metrics(
    episode: FinishedEpisode, completions: Sequence[GradingCompletion]
) -> tuple[NamedValue, ...]:
    """Numbers about every episode that reports and the console show."""
    values = {
        "turns": float(len(episode.manifest)),
        "output_tokens": float(sum(entry.output_tokens for entry in episode.manifest)),
        "duration_s": episode.duration_s,
    }
    if episode.virtual_s is not None:
        values["virtual_s"] = episode.virtual_s
    if completions:
        calls = [len(completion.message.get("tool_calls") or ()) for completion in completions]
        values["tool_calls"] = float(sum(calls))
        values["parallel_turns"] = float(sum(count > 1 for count in calls))
        values["malformed_tool_calls"] = float(sum(c.malformed_tool_calls for c in completions))
    return tuple(NamedValue(name=name, value=value) for name, value in values.items())
