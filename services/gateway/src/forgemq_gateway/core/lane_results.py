"""What a lane says about an attempt, and whose fault a failure is."""

from msgspec import Struct

from forgemq_contracts.completions import FailureKind
from forgemq_gateway.core.episodes import HeldEpisode
from forgemq_gateway.core.known_completion import KnownCompletion
from forgemq_gateway.core.turns import OpenTurn

# A lane that reports a deadline this much too early has a wrong clock, which is its own error.
CLOCK_SLACK_MS = 2000


class LaneResult(Struct, frozen=True, kw_only=True):
    """What a FinishedCompletion means: a completion, or an attempt that failed."""

    episode: HeldEpisode
    request_id: str
    attempt: int
    completion: KnownCompletion | None
    failure: FailureKind = "engine"
    error: str = ""
    is_constraint_refused: bool = False


def is_engines_fault(result: LaneResult, turn: OpenTurn, *, wall_ms: int) -> bool:
    """Whether the failure speaks of the lane rather than of the request."""
    if result.is_constraint_refused:
        return False
    match result.failure:
        case "context_overflow":
            return False
        case "context_missing":
            return turn.needs_full_context  # It had the full context.
        case "deadline":
            return wall_ms < turn.deadline_ms - CLOCK_SLACK_MS
        case _:
            return True
