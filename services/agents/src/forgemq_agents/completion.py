"""One answer of the policy, as an OpenAI chat completion."""

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Struct

Message: TypeAlias = dict[str, Any]
Tool: TypeAlias = dict[str, Any]


class ToolCall(Struct, frozen=True, kw_only=True):
    """One tool call the policy made."""

    id: str
    name: str
    arguments: Annotated[
        dict[str, Any] | None, Meta(description="None where they are no JSON object.")
    ]


class Completion(Struct, frozen=True, kw_only=True):
    """One answer; `message` goes into the history exactly as it is."""

    id: str
    message: Message
    finish_reason: str

    @property
    def completion_id(self) -> str:
        """Id by which rewards name this completion."""
        return self.id.rpartition("-")[2]

    @property
    def text(self) -> str:
        """Text beside the tool calls, "" where there is none."""
        content = self.message.get("content")
        return content if isinstance(content, str) else ""

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Tool calls in order."""
        return tuple(
            ToolCall(
                id=call["id"],
                name=call["function"]["name"],
                arguments=_object(call["function"]["arguments"]),
            )
            for call in self.message.get("tool_calls") or ()
        )


class _Choice(Struct, frozen=True):
    message: Message
    finish_reason: str | None = None


class _ChatCompletion(Struct, frozen=True):
    id: str
    choices: Annotated[list[_Choice], Meta(min_length=1)]


def read_completion(body: bytes) -> Completion:
    """The first choice of a chat completion's body."""
    decoded = msgspec.json.decode(body, type=_ChatCompletion)
    choice = decoded.choices[0]
    return Completion(
        id=decoded.id, message=choice.message, finish_reason=choice.finish_reason or ""
    )


def _object(arguments: object) -> dict[str, Any] | None:
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except msgspec.DecodeError:
            return None
    return arguments if isinstance(arguments, dict) else None
