"""Which requests of a lane run: none twice, cancelled, late, or of another epoch."""

from collections import OrderedDict
from typing import Literal, NamedTuple, TypeAlias

from forgemq_contracts.completions import (
    CancelledCompletion,
    FailureKind,
    RequestedCompletion,
)
from forgemq_inference.core.context import TokenContext
from forgemq_inference.core.remembered import RememberedCompletions

ATTEMPTS_SEEN_MAX = 200_000
"""Hours of requests at 20 per second; a redelivery comes within seconds."""


class Attempt(NamedTuple):
    """One attempt at one completion."""

    request_id: str
    number: int


class Run(NamedTuple):
    """The request goes to the engine with this context."""

    attempt: Attempt
    context: TokenContext


class Refused(NamedTuple):
    """The request is answered without the engine."""

    finish_reason: Literal["abort", "error"]
    failure: FailureKind
    error: str


class Skipped(NamedTuple):
    """Another process answers the request, or this one has already."""

    reason: Literal["other_epoch", "duplicate"]


Decision: TypeAlias = Run | Refused | Skipped

CANCELLED = Refused("abort", "cancelled", "cancelled")
DEADLINE = Refused("error", "deadline", "deadline")
CONTEXT_MISSING = Refused("error", "context_missing", "context_missing")


class LaneState:
    """Decides about every request of one lane under one epoch.

    `take` decides when the request is read, `before_start` again when a slot is free, and `end`
    forgets it. `cancel` may come before its request: the topics have no common order.

    Example: a request of epoch 3 on a lane in epoch 4 is skipped; the gateway redispatches it.
    """

    def __init__(self, *, lane: int, epoch: int, remembered_bytes_max: int) -> None:
        """Begin without any request."""
        self._lane = lane
        self._epoch = epoch
        self._seen: OrderedDict[Attempt, None] = OrderedDict()
        self._cancelled: OrderedDict[str, int] = OrderedDict()
        self._open: dict[str, set[int]] = {}
        self.remembered = RememberedCompletions(bytes_max=remembered_bytes_max)

    def take(self, request: RequestedCompletion, *, now_ms: int) -> Decision:
        """Decide what happens to a request that was just read; after `Run`, call `end`."""
        attempt = Attempt(request.request_id, request.attempt)
        if (request.lane, request.epoch) != (self._lane, self._epoch):
            return Skipped("other_epoch")
        if attempt in self._seen:
            return Skipped("duplicate")
        _add_bounded(self._seen, attempt)
        if (refused := self._refusal(attempt, request.deadline_ms, now_ms)) is not None:
            return refused
        context = self._context(request)
        if context is None:
            return CONTEXT_MISSING
        self._open.setdefault(attempt.request_id, set()).add(attempt.number)
        return Run(attempt, context)

    def before_start(self, attempt: Attempt, *, deadline_ms: int, now_ms: int) -> Refused | None:
        """Why a request that waited must not start; None if it may."""
        return self._refusal(attempt, deadline_ms, now_ms)

    def cancel(self, cancelled: CancelledCompletion) -> list[Attempt]:
        """Note a cancellation; returns the open attempts it ends: this one and earlier ones."""
        request_id, last = cancelled.request_id, cancelled.attempt
        self._cancelled[request_id] = max(last, self._cancelled.get(request_id, last))
        while len(self._cancelled) > ATTEMPTS_SEEN_MAX:
            self._cancelled.popitem(last=False)
        numbers = sorted(self._open.get(request_id, ()))
        return [Attempt(request_id, number) for number in numbers if number <= last]

    def is_cancelled(self, attempt: Attempt) -> bool:
        """Whether this attempt or a later one of its request was cancelled."""
        return attempt.number <= self._cancelled.get(attempt.request_id, -1)

    def end(self, attempt: Attempt) -> None:
        """Forget an open attempt; idempotent."""
        numbers = self._open.get(attempt.request_id, set())
        numbers.discard(attempt.number)
        if not numbers:
            self._open.pop(attempt.request_id, None)

    def _refusal(self, attempt: Attempt, deadline_ms: int, now_ms: int) -> Refused | None:
        if self.is_cancelled(attempt):
            return CANCELLED
        return DEADLINE if now_ms >= deadline_ms else None

    def _context(self, request: RequestedCompletion) -> TokenContext | None:
        if not request.is_delta:
            return TokenContext().extended(request.context)
        if request.parent_id is None:
            return None
        prefix = self.remembered.prefix(
            request.parent_id, tokens_count=request.shared_prefix_tokens
        )
        return None if prefix is None else prefix.extended(request.context)


def _add_bounded(seen: "OrderedDict[Attempt, None]", attempt: Attempt) -> None:
    seen[attempt] = None
    while len(seen) > ATTEMPTS_SEEN_MAX:
        seen.popitem(last=False)
