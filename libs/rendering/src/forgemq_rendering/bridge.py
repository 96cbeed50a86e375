"""What a renderer that knows the model puts behind a sampled turn, which stays as it is."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from renderers.base import Renderer


class Bridged(Struct, frozen=True):
    """Tokens behind a sampled turn, and the index of the message that each belongs to, or -1."""

    ids: list[int]
    message_indices: list[int]


def bridge(
    renderer: Renderer,
    turn: tuple[Sequence[int], Sequence[int]],
    messages: list[dict[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    reasoning_end: Sequence[int],
) -> Bridged | None:
    """The tokens from the end of a turn up to the first token of the next assistant message.

    Renderers of the package give up on a turn whose last token ended it within its reasoning. What
    follows it is what follows the same turn with closed reasoning: both end with the same token.

    Args:
        renderer: Of the model.
        turn: Context and output; the output is not empty.
        messages: The new ones.
        tools: As in the context.
        reasoning_end: The mark that closes reasoning.

    Returns:
        None if the renderer changes the turn, or has nothing to put behind it.
    """
    context, output = turn
    closed = [*output[:-1], *reasoning_end, output[-1]]
    for said in (output, closed):
        before = [*context, *said]
        bridged = renderer.bridge_to_next_turn(list(context), list(said), messages, tools=tools)
        if bridged is not None and bridged.token_ids[: len(before)] == before:
            count = len(before)
            return Bridged(bridged.token_ids[count:], bridged.message_indices[count:])
    return None
