"""What the output of a turn is read with: tools whose calls count, and what stands before it."""

from collections.abc import Mapping, Sequence
from typing import Any

from forgemq_contracts.completions import TurnPart
from forgemq_contracts.turn_reading import is_raw, parses_tools
from forgemq_gateway.core.episodes import HeldEpisode
from forgemq_gateway.core.history import TAIL_TOKENS
from forgemq_gateway.core.known_completion import TOKEN_BYTES, KnownCompletion


def tools_of(episode: HeldEpisode, part: TurnPart) -> Sequence[Mapping[str, Any]] | None:
    """The tools whose calls are read in the output of a turn; None: it is a text alone."""
    if is_raw(part):
        return None
    return episode.tools.get(part.tools_digest, ()) if parses_tools(part) else ()


def context_tail(
    episode: HeldEpisode, context: bytes, *, parent: KnownCompletion | None, shared_tokens: int
) -> bytes:
    """The last tokens of a turn's context, which say how its output is to be read."""
    whole = episode.history.tail_before(shared_tokens, parent=parent) + context
    return whole[-TAIL_TOKENS * TOKEN_BYTES :]
