"""An assistant's message as it is read in sampled tokens."""

from typing import Any

from msgspec import Struct
from msgspec.structs import replace


class ToolCall(Struct, frozen=True, kw_only=True):
    """One call the model made; the id is unique over the whole run."""

    id: str
    name: str
    arguments: str


class Parsed(Struct, frozen=True, kw_only=True):
    """The assistant message in sampled tokens; `malformed` counts calls that did not parse."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: int = 0

    def up_to(self, stop: str) -> "Parsed":
        """The message up to the stop string that ended it, as the gateway sends it; "": whole.

        A message is read in this order: reasoning, content, calls.
        """
        if stop and stop in self.reasoning:
            return replace(self, content="", reasoning=_before(stop, self.reasoning), tool_calls=())
        if stop and stop in self.content:
            return replace(self, content=_before(stop, self.content), tool_calls=())
        return self


def chat_message(parsed: Parsed) -> dict[str, Any]:
    """The assistant's turn in OpenAI chat form, as the gateway sends it."""
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in parsed.tool_calls
    ]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": parsed.content if parsed.content or not calls else None,
    }
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _before(stop: str, text: str) -> str:
    return text.partition(stop)[0]
