"""The conversation that ends with a turn, put together from the turns before it."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from forgemq_contracts.recorded_turns import RecordedTurn

Message: TypeAlias = dict[str, Any]


def conversation_to(
    turn: RecordedTurn | None, turns: Sequence[RecordedTurn]
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """The messages up to and with the reply of this turn, and its tools; nothing for None.

    A fork has its whole history in its own messages; any other turn continues its parent's.

    Raises:
        KeyError: a parent is not among `turns`.
    """
    if turn is None:
        return (), ()
    by_id = {each.completion_id: each for each in turns}
    path = [turn]
    while not path[-1].is_fork and path[-1].parent_id is not None:
        path.append(by_id[path[-1].parent_id])
    messages = [m for each in reversed(path) for m in (*each.messages, each.reply)]
    return tuple(messages), turn.tools


def context_of(turn: RecordedTurn, turns: Sequence[RecordedTurn]) -> bytes:
    """The whole context of a turn as int32 bytes, put together from its ancestors.

    Raises:
        KeyError: a parent is not among `turns`.
    """
    by_id = {each.completion_id: each for each in turns}
    pieces, wanted, at = [turn.context_ids], 4 * turn.shared_prefix_tokens, turn
    while wanted:
        parent = by_id[at.parent_id or ""]
        start = 4 * parent.shared_prefix_tokens
        if wanted > start:
            own = parent.context_ids + parent.output_ids
            pieces.append(own[: wanted - start])
            wanted = start
        at = parent
    return b"".join(reversed(pieces))
