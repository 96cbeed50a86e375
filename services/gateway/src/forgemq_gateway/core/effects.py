"""What the policy of attempts decides; `dispatcher.py` applies it."""

from typing import TypeAlias

from msgspec import Struct

from forgemq_contracts.completions import CancelledCompletion, FailureKind, RequestedCompletion
from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.core.known_completion import KnownCompletion


class SendAttempt(Struct, frozen=True):
    """Write this request to its lane."""

    record: RequestedCompletion


class CancelAttempt(Struct, frozen=True):
    """Let the lane stop."""

    record: CancelledCompletion


class AnswerTurn(Struct, frozen=True):
    """Every waiting client gets this completion."""

    completion: KnownCompletion


class FailTurn(Struct, frozen=True):
    """Every waiting client gets this error."""

    request_id: str
    error: RefusedError


class ReportFailure(Struct, frozen=True):
    """An attempt that clients wait for failed: count it, and say why."""

    request_id: str
    failure: FailureKind
    error: str


class ReportCircuit(Struct, frozen=True):
    """A lane's engine fails and takes no request for this long: count it, and name the lane."""

    lane: int
    pause_s: float
    error: str


Effect: TypeAlias = (
    SendAttempt | CancelAttempt | AnswerTurn | FailTurn | ReportFailure | ReportCircuit
)
Effects: TypeAlias = tuple[Effect, ...]
