"""How a request is sampled: as the episode pins it; the client decides only length and stops."""

import msgspec

from forgemq_contracts.episodes import STOP_STRINGS_MAX, Sampling
from forgemq_gateway.core.errors import context_overflow, invalid


def pinned_sampling(run: Sampling, *, temperature: float | None) -> Sampling:
    """Sampling of every request of an episode.

    Args:
        run: Sampling of the run.
        temperature: The group's temperature, which replaces the run's; 0 is greedy.
    """
    return run if temperature is None else msgspec.structs.replace(run, temperature=temperature)


def reading_sampling(
    *, given_tokens: int, context_tokens: int, context_tokens_max: int
) -> Sampling:
    """Of a reply that is read: its log-probabilities are those of the policy itself, untempered.

    Raises:
        RefusedError: 400 context_length_exceeded: context and reply do not fit.
    """
    if context_tokens + given_tokens > context_tokens_max:
        raise context_overflow(
            context_tokens=context_tokens + given_tokens, context_tokens_max=context_tokens_max
        )
    return Sampling(temperature=1.0, max_tokens=given_tokens)


def used_sampling(
    pinned: Sampling,
    *,
    max_tokens: int | None,
    stop: tuple[str, ...],
    stop_token_ids: tuple[int, ...],
    context_tokens: int,
    context_tokens_max: int,
) -> Sampling:
    """Sampling of one request: temperature and support are pinned, and not the client's to choose.

    The length is the smallest of what was asked, what is pinned and what fits the context.

    Raises:
        RefusedError: 400 context_length_exceeded: not even one token fits; 400: too many stop
            strings for an engine.
    """
    room = context_tokens_max - context_tokens
    if room < 1:
        raise context_overflow(context_tokens=context_tokens, context_tokens_max=context_tokens_max)
    return msgspec.structs.replace(
        pinned,
        max_tokens=min(
            pinned.max_tokens if max_tokens is None else max_tokens, pinned.max_tokens, room
        ),
        stop=_stop_strings(pinned.stop, stop),
        stop_token_ids=tuple(dict.fromkeys((*pinned.stop_token_ids, *stop_token_ids))),
    )


def _stop_strings(pinned: tuple[str, ...], asked: tuple[str, ...]) -> tuple[str, ...]:
    """What ends an output; not the empty text, at which an engine ends it after one token.

    Raises:
        RefusedError: 400, there are more than an engine takes.
    """
    stops = tuple(dict.fromkeys(text for text in (*pinned, *asked) if text))
    if len(stops) > STOP_STRINGS_MAX:
        raise invalid(
            f"there must be at most {STOP_STRINGS_MAX} stop strings, with the run's "
            f"{len(pinned)}, got {len(stops)}",
            param="stop",
        )
    return stops
