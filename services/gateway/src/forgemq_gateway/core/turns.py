"""One request of a client, from its body to its delivery, whatever attempts that takes."""

from typing import Literal, TypeAlias

from msgspec import Struct

from forgemq_contracts.completions import RequestedCompletion, TurnPart
from forgemq_contracts.episodes import Sampling
from forgemq_gateway.core.history import TOKEN_BYTES, Completion, cached_tokens, tokens_of

TurnState: TypeAlias = Literal["preparing", "requested", "ended"]


class Turn(Struct, kw_only=True, eq=False):
    """A request in flight; several clients may wait for it.

    Attributes:
        context: Tokens after the `shared_tokens` it has in common with its parent.
        sent: How often it was given to a lane; the newest attempt is one less.
        lane: Where it is, -1 while it is nowhere.
        errors: Attempts that an engine failed; lanes that died do not count.
        waiting: Clients that want the answer.
        before: The request that the same body led to earlier.
    """

    request_id: str
    body_digest: str
    ordinal: int
    sequence: int
    requested_ms: int
    deadline_ms: int
    state: TurnState = "preparing"
    part: TurnPart | None = None
    parent: Completion | None = None
    shared_tokens: int = 0
    context: bytes = b""
    context_tokens: int = 0
    sampling: Sampling | None = None
    sent: int = 0
    lane: int = -1
    epoch: int = -1
    needs_full_context: bool = False
    errors: int = 0
    waiting: int = 0
    before: str | None = None


def requested(
    turn: Turn, *, episode_id: str, group_id: str, lane: int, epoch: int
) -> RequestedCompletion:
    """The record of the next attempt of this turn, as a delta where the lane knows the parent."""
    if turn.part is None or turn.sampling is None:
        raise ValueError(f"turn {turn.request_id} is not prepared")
    parent = turn.parent
    is_delta = (
        parent is not None
        and not turn.needs_full_context
        and parent.lane == lane
        and parent.epoch == epoch
    )
    context = turn.context
    if parent is not None and not is_delta:
        context = tokens_of(parent, count=turn.shared_tokens) + context
    return RequestedCompletion(
        request_id=turn.request_id,
        attempt=turn.sent,
        episode_id=episode_id,
        group_id=group_id,
        lane=lane,
        epoch=epoch,
        sampling=turn.sampling,
        deadline_ms=turn.deadline_ms,
        requested_ms=turn.requested_ms,
        turn=turn.part,
        parent_id=None if parent is None else parent.request_id,
        shared_prefix_tokens=turn.shared_tokens,
        context=context,
        is_delta=is_delta,
    )


def restored(record: RequestedCompletion, *, parent: Completion | None) -> Turn:
    """The turn that this record gave to a lane, with nobody waiting for it."""
    shared = record.shared_prefix_tokens
    context = record.context if record.is_delta else record.context[shared * TOKEN_BYTES :]
    return Turn(
        request_id=record.request_id,
        body_digest=record.turn.body_digest,
        ordinal=record.turn.ordinal,
        sequence=record.turn.sequence,
        requested_ms=record.requested_ms,
        deadline_ms=record.deadline_ms,
        state="requested",
        part=record.turn,
        parent=parent,
        shared_tokens=shared,
        context=context,
        context_tokens=shared + len(context) // TOKEN_BYTES,
        sampling=record.sampling,
        sent=record.attempt + 1,
        lane=record.lane,
        epoch=record.epoch,
    )


def cached_on(turn: Turn, lane: int, epoch: int) -> int:
    """Leading context tokens of the turn that this lane has computed."""
    return cached_tokens(turn.parent, shared=turn.shared_tokens, lane=lane, epoch=epoch)
