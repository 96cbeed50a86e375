"""What the page shows, as values: a bounded state, and one group's turns with their tokens."""

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, TypeVar

from msgspec import Meta, Struct
from msgspec.structs import replace

from forgemq_contracts.fields import ForkReason
from forgemq_contracts.messages import Message
from forgemq_run_view.report import Report
from forgemq_run_view.rewards import EpisodeReward, TurnReward
from forgemq_run_view.state import RunState
from forgemq_run_view.trajectory import CutView, ImportedMessage, TrajectoryTurn, trajectories

CURVE_POINTS_MAX = 600
"""More points than a curve has pixels are not sent."""

Point = TypeVar("Point")
TokenText = Callable[[int], str]


class Token(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One token: sampled ones have a log-probability and a weight version."""

    id: int
    text: str
    logprob: float | None = None
    version: int | None = None


class TurnView(Struct, frozen=True, kw_only=True):
    """One completion as the page shows it."""

    completion_id: str
    parent_id: str | None
    sequence: int
    shared_prefix_tokens: int
    context: tuple[Token, ...]
    output: tuple[Token, ...]
    temperature: float
    support: str
    finish_reason: str
    queued_s: float
    engine_s: float
    cached_tokens: int
    reward: TurnReward
    fork_reason: ForkReason | None = None
    cuts: tuple[CutView, ...] = ()
    seen: Annotated[
        tuple[Token, ...],
        Meta(
            description="The whole context, if it was cut before this turn and the log still has "
            "all that it goes on from; else empty."
        ),
    ] = ()


class EpisodeView(Struct, frozen=True, kw_only=True):
    """One episode as the page shows it."""

    episode_id: str
    turns: tuple[TurnView, ...]
    reward: Annotated[EpisodeReward | None, Meta(description="null until its group is scored.")]
    messages: Annotated[
        tuple[ImportedMessage, ...], Meta(description="Of a conversation that was imported.")
    ] = ()


class GroupView(Struct, frozen=True, kw_only=True):
    """One group: the ids of its episodes, and one of them in full."""

    group_id: str
    episode_ids: tuple[str, ...]
    episode: EpisodeView | None


class RunRow(Struct, frozen=True, kw_only=True):
    """One run as the list shows it."""

    run: str
    started_ms: int
    ended: Annotated[str, Meta(description="As in RunState.")]
    ended_ms: int | None
    steps: Annotated[int, Meta(description="That it was to train.")]
    seed: int
    model: Annotated[str, Meta(description="Last part of its folder.")]
    domains: tuple[str, ...]
    results: Annotated[dict[str, float], Meta(description="What its last record says; by name.")]


class ComparedRun(Struct, frozen=True, kw_only=True):
    """One side of a comparison."""

    state: RunState
    report: Report
    left_out: Annotated[
        str, Meta(description="Why records in the blob store are in no number; '': all are.")
    ]


def bounded(state: RunState) -> RunState:
    """The state with at most `CURVE_POINTS_MAX` points a curve, the last one always there.

    Of the alarms the newest so many stay, whether or not their step's point does.
    """
    return replace(
        state,
        points=_thinned(state.points),
        versions=_thinned(state.versions),
        alarms=state.alarms[-CURVE_POINTS_MAX:],
        acceptance=_thinned(state.acceptance),
    )


def group_view(
    group_id: str,
    messages: Iterable[Message],
    *,
    episode_id: str | None,
    token_text: TokenText,
    episodes_max: int,
) -> GroupView:
    """A group's episodes; the one asked for in full, else the first."""
    found = trajectories(messages)
    chosen = next((each for each in found if each.episode_id == episode_id), None)
    shown = chosen if chosen is not None else (found[0] if found else None)
    return GroupView(
        group_id=group_id,
        episode_ids=tuple(each.episode_id for each in found[:episodes_max]),
        episode=(
            EpisodeView(
                episode_id=shown.episode_id,
                turns=tuple(_turn(turn, token_text=token_text) for turn in shown.turns),
                reward=shown.reward,
                messages=shown.messages,
            )
            if shown
            else None
        ),
    )


def _turn(turn: TrajectoryTurn, *, token_text: TokenText) -> TurnView:
    return TurnView(
        completion_id=turn.completion_id,
        parent_id=turn.parent_id,
        sequence=turn.sequence,
        shared_prefix_tokens=turn.shared_prefix_tokens,
        context=tuple(Token(id=each, text=token_text(each)) for each in turn.context),
        output=tuple(
            Token(id=token, text=token_text(token), logprob=logprob, version=version)
            for token, logprob, version in zip(
                turn.output, turn.logprobs, turn.versions, strict=False
            )
        ),
        temperature=turn.temperature,
        support=turn.support,
        finish_reason=turn.finish_reason,
        queued_s=turn.queued_s,
        engine_s=turn.engine_s,
        cached_tokens=turn.cached_tokens,
        reward=turn.reward,
        fork_reason=turn.fork_reason,
        cuts=turn.cuts,
        seen=tuple(Token(id=each, text=token_text(each)) for each in turn.seen),
    )


def _thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    stride = -(-len(points) // CURVE_POINTS_MAX) or 1
    return tuple(points[(len(points) - 1) % stride :: stride])
