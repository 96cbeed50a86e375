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
