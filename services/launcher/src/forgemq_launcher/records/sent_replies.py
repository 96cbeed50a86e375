"""Reads the message that a completion was to its agent, as the gateway did."""

from collections.abc import Mapping, Sequence
from typing import Any

from forgemq_contracts.arrays import unpack_ids
from forgemq_contracts.completions import FinishedCompletion
from forgemq_contracts.turn_reading import is_raw
from forgemq_rendering import Rendering, chat_message


def sent_reply(
    completion: FinishedCompletion,
    *,
    rendering: Rendering,
    context: Sequence[int],
    tools: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The assistant's message in OpenAI's chat form, up to the stop string that ended it.

    Args:
        completion: Of any protocol.
        rendering: Of the run's model.
        context: What the policy saw, at least its end.
        tools: Those that the policy could call.
    """
    parsed = rendering.parse(
        unpack_ids(completion.output),
        completion_id=completion.request_id,
        tools=None if is_raw(completion.turn) else tools,
        context=context,
    )
    return chat_message(parsed.up_to(completion.stop_string))
