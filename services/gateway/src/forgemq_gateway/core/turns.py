"""One request of a client, from its body to its answer, whatever attempts that takes."""

from collections.abc import Mapping
from typing import Literal, TypeAlias

from msgspec import Struct

from forgemq_contracts.completions import RequestedCompletion
from forgemq_contracts.lanes import WeightsId
from forgemq_gateway.core.completion_tokens import tokens_of
from forgemq_gateway.core.known_completion import TOKEN_BYTES, KnownCompletion
from forgemq_gateway.core.lane_caches import (
    Emptied,
    FirstPrompts,
    LaneCache,
    cached_on,
    cached_tokens,
)
from forgemq_gateway.core.message_paths import NO_BRANCH, Branch
from forgemq_gateway.core.plans import Prepared

TurnState: TypeAlias = Literal["preparing", "held", "requested", "ended"]


class OpenTurn(Struct, kw_only=True, eq=False):
    """A request without its completion; `core/attempts.py` alone writes its fields.

    Lifecycle: preparing (made into tokens) -> held (waits for its first lane) -> requested (a lane
    had it) -> ended. Refused or abandoned before a lane had it, it ends at once and its body is new
    again. Afterwards it stays requested, so that a client that comes back continues it.

    Attributes:
        branch: What it has noted in the episode's history, to be taken back if no lane has it.
        after_offset: Offset of the episode's newest completion when it was requested.
        earlier_id: The request that the same body led to before, if any.
        held_s: How long its client was held before the turn began.
        cached_expected: Context tokens that the lane of its newest attempt should have cached; None
            if that attempt is one of before a restart.
        expected_under: The weights of that lane when it was chosen.
        sent: How often it was given to a lane; the newest attempt is `sent - 1`.
        lane: The lane that has its newest attempt; -1 if no lane has it.
        engine_errors: Attempts that an engine failed since the last refusal; dead lanes are no
            engine errors.
        failed_on: The lane whose engine failed its newest attempt; -1 if none did.
        not_before_s: Monotonic time of its next attempt at the earliest.
        waiting: Clients that wait for the answer and have not heard yet.
    """

    request_id: str
    episode_id: str
    group_id: str
    body_digest: str
    branch: Branch = NO_BRANCH
    ordinal: int
    sequence: int
    requested_ms: int
    after_offset: int | None = None
    earlier_id: str | None = None
    deadline_ms: int
    state: TurnState = "preparing"
    prepared: Prepared | None = None
    held_s: float = 0.0
    held_until_s: float = 0.0
    cached_expected: int | None = None
    expected_under: WeightsId | None = None
    sent: int = 0
    lane: int = -1
    epoch: int = -1
    needs_full_context: bool = False
    engine_errors: int = 0
    failed_on: int = -1
    not_before_s: float = 0.0
    waiting: int = 0


def requested(turn: OpenTurn, *, lane: int, epoch: int) -> RequestedCompletion:
    """The record of the turn's next attempt: a delta if this lane computed the parent."""
    prepared = turn.prepared
    if prepared is None:
        raise ValueError(f"turn {turn.request_id} is not prepared")
    parent = prepared.parent
    is_delta = (
        parent is not None
        and not turn.needs_full_context
        and parent.lane == lane
        and parent.epoch == epoch
    )
    context = prepared.context
    if parent is not None and not is_delta:
        context = tokens_of(parent, count=prepared.shared_tokens) + context
    return RequestedCompletion(
        request_id=turn.request_id,
        attempt=turn.sent,
        episode_id=turn.episode_id,
        group_id=turn.group_id,
        lane=lane,
        epoch=epoch,
        sampling=prepared.sampling,
        deadline_ms=turn.deadline_ms,
        requested_ms=turn.requested_ms,
        turn=prepared.part,
        parent_id=None if parent is None else parent.request_id,
        shared_prefix_tokens=prepared.shared_tokens,
        context=context,
        is_delta=is_delta,
        constraint=prepared.constraint,
        top_tokens=prepared.top_tokens,
        is_live=prepared.is_live,
        given=prepared.given,
    )


def restored(record: RequestedCompletion, *, parent: KnownCompletion | None) -> OpenTurn:
    """The turn that this record gave to a lane, with no client waiting for it."""
    shared = record.shared_prefix_tokens
    context = record.context if record.is_delta else record.context[shared * TOKEN_BYTES :]
    return OpenTurn(
        request_id=record.request_id,
        episode_id=record.episode_id,
        group_id=record.group_id,
        body_digest=record.turn.body_digest,
        ordinal=record.turn.ordinal,
        sequence=record.turn.sequence,
        requested_ms=record.requested_ms,
        after_offset=record.turn.after_offset,
        deadline_ms=record.deadline_ms,
        state="requested",
        prepared=Prepared(
            parent=parent,
            shared_tokens=shared,
            context=context,
            context_tokens=shared + len(context) // TOKEN_BYTES,
            sampling=record.sampling,
            constraint=record.constraint,
            top_tokens=record.top_tokens,
            is_live=record.is_live,
            given=record.given,
            part=record.turn,
        ),
        sent=record.attempt + 1,
        lane=record.lane,
        epoch=record.epoch,
    )


def cached_by_lane(
    prepared: Prepared, first_prompts: FirstPrompts, *, emptied: Emptied
) -> Mapping[LaneCache, int]:
    """Leading context tokens that each lane has computed, if it has any."""
    if prepared.parent is None:
        return first_prompts.cached_tokens(prepared.context, emptied=emptied)
    return cached_tokens(prepared.parent, shared=prepared.shared_tokens, emptied=emptied)


def cached_expected(
    prepared: Prepared, first_prompts: FirstPrompts, *, where: LaneCache, emptied: Emptied
) -> int:
    """Context tokens that an engine will say it had: it reads the last one of a context again."""
    if prepared.parent is None:
        cached = first_prompts.cached_on(where, prepared.context, emptied=emptied)
    else:
        cached = cached_on(where, prepared.parent, shared=prepared.shared_tokens, emptied=emptied)
    return min(cached, prepared.context_tokens - 1)
