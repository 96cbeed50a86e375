"""The episode pins how it is sampled; a client decides lengths and stops, within the pins."""

import msgspec

from forgemq_contracts.episodes import Sampling
from forgemq_gateway.core.errors import context_overflow


def pinned_sampling(run: Sampling, *, temperature: float | None) -> Sampling:
    """What every request of an episode is sampled with.

    Args:
        run: The run's own.
        temperature: The group's, where it has one; 0 is greedy.
    """
    return run if temperature is None else msgspec.structs.replace(run, temperature=temperature)


def used_sampling(
    pinned: Sampling,
    *,
    max_tokens: int | None,
    stop: tuple[str, ...],
    stop_token_ids: tuple[int, ...],
    context_tokens: int,
    context_tokens_max: int,
) -> Sampling:
    """Sampling of one request: temperature and support as pinned, whatever the client asked.

    The length is the smallest of what was asked, what is pinned and what the model still fits.

    Raises:
        RefusedError: 400 context_length_exceeded: not even one token fits.
    """
    room = context_tokens_max - context_tokens
    if room < 1:
        raise context_overflow(context_tokens=context_tokens, context_tokens_max=context_tokens_max)
    return msgspec.structs.replace(
        pinned,
        max_tokens=min(
            pinned.max_tokens if max_tokens is None else max_tokens, pinned.max_tokens, room
        ),
        stop=tuple(dict.fromkeys((*pinned.stop, *stop))),
        stop_token_ids=tuple(dict.fromkeys((*pinned.stop_token_ids, *stop_token_ids))),
    )
