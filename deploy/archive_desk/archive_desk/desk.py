"""The desk as an environment: one tool, which reads a page."""

from collections.abc import Mapping, Sequence
from typing import Any

from archive_desk.archive import FILES, Inquiry
from forgemq_agents import Completion, Message, Tool
from forgemq_agents.tool_loop import Append, Move, Stop, answer_calls

# Five files take 5 pages, 5 notes and the answer; the rest is for calls that have to be repeated.
TURNS_MAX = 14

ANSWERED = "answered"
BAD_CALL = '{"error": "bad call"}'
NO_FILE = '{"error": "no item"}'
_MARKUP = "tool_call>"

READ: Tool = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "page of one item",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
    },
}


class ArchiveDesk:
    """The desk with one visitor; `reads` counts the pages that were read."""

    def __init__(self, inquiry: Inquiry) -> None:
        self._inquiry = inquiry
        self.reads = 0

    @property
    def tools(self) -> Sequence[Tool]:
        """Tools offered to the model, the same in every turn."""
        return (READ,)

    def opening(self) -> list[Message]:
        """The visitor's question; what the model keeps comes to its end."""
        return [{"role": "user", "content": self._inquiry.question}]

    async def answer(self, completion: Completion) -> Move:
        """Read what the turn asks for; a turn without a call is the answer to the visitor."""
        if completion.calls:
            return Append(
                await answer_calls(completion.calls, {"read": self._read}, bad_call=BAD_CALL)
            )
        if _MARKUP in completion.text:
            return Append([{"role": "tool", "tool_call_id": "unread", "content": BAD_CALL}])
        return Stop(ANSWERED)

    async def _read(self, arguments: Mapping[str, Any]) -> str:
        name = arguments.get("item")
        if len(arguments) != 1 or not isinstance(name, str):
            return BAD_CALL
        if name not in FILES:
            return NO_FILE
        self.reads += 1
        return self._inquiry.page(name)
