"""What an engine can take, and why it must not see a request beyond that."""

from msgspec import Struct

from forgemq_contracts.arrays import unpack_ids
from forgemq_inference.core.context import TokenContext
from forgemq_inference.core.lane import Refused
from forgemq_inference.core.routes import Experts


class EngineLimits(Struct, frozen=True, kw_only=True):
    """What the engine can take; beyond it a request is refused here.

    Attributes:
        context_tokens_max: Context and output together.
        input_tokens_max: Context alone.
        vocabulary_size: A token id at or above it would end the engine's process.
        experts: None for a dense model.
        records_routes: Whether the engine can say which experts ran for a token.
        attention_groups: Groups of its processes that each attend for requests of their own.
    """

    context_tokens_max: int
    input_tokens_max: int
    vocabulary_size: int
    experts: Experts | None = None
    records_routes: bool = False
    attention_groups: int = 1


def overflow(tokens_count: int, limits: EngineLimits) -> Refused:
    """The refusal of what is too long for the engine to read."""
    return Refused(
        "error",
        "context_overflow",
        f"context_overflow: a context of {tokens_count} tokens is over the engine's limit of "
        f"{min(limits.input_tokens_max, limits.context_tokens_max - 1)}",
    )


def unreadable(context: TokenContext, brought: bytes, *, limits: EngineLimits) -> Refused | None:
    """Why the engine must not read these tokens although they fit; None if it may.

    Args:
        context: All of them.
        brought: New ones: those that a delta continues were checked on arrival, or sampled by the
            engine.
        limits: Of the engine.
    """
    if not context.tokens_count:
        return Refused("error", "engine", "engine: the context is empty")
    ids = unpack_ids(brought)
    if ids and (min(ids) < 0 or max(ids) >= limits.vocabulary_size):
        return Refused(
            "error",
            "engine",
            f"engine: a token id is outside the vocabulary of {limits.vocabulary_size}",
        )
    return None
