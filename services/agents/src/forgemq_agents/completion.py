"""One answer of the model, read from an OpenAI chat completion."""

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Struct

Message: TypeAlias = dict[str, Any]
Tool: TypeAlias = dict[str, Any]


class FunctionCall(Struct, frozen=True, kw_only=True):
    """One tool call of the model, its arguments decoded."""

    id: str
    name: str
    arguments: Annotated[
        dict[str, Any] | None, Meta(description="None if they are not a JSON object.")
    ]


class Completion(Struct, frozen=True, kw_only=True):
    """One answer of the model; append `message` to the messages exactly as it is."""

    id: str
    message: Message
    finish_reason: str
    total_tokens: Annotated[
        int, Meta(ge=0, description="Of its context and itself; 0 if the server does not say.")
    ] = 0

    @property
    def completion_id(self) -> str:
        """Id by which a reward names this completion."""
        return self.id.rpartition("-")[2]

    @property
    def text(self) -> str:
        """Text of the answer beside its tool calls, "" if there is none."""
        content = self.message.get("content")
        return content if isinstance(content, str) else ""

    @property
    def calls(self) -> tuple[FunctionCall, ...]:
        """Tool calls in the model's order."""
        return tuple(
            FunctionCall(
                id=call["id"],
                name=call["function"]["name"],
                arguments=_object(call["function"]["arguments"]),
            )
            for call in self.message.get("tool_calls") or ()
        )


class _Choice(Struct, frozen=True):
    message: Message
    finish_reason: str | None = None


class _Usage(Struct, frozen=True):
    total_tokens: int = 0


class _ChatCompletion(Struct, frozen=True):
    id: str
    choices: Annotated[list[_Choice], Meta(min_length=1)]
    usage: _Usage | None = None


def read_completion(body: bytes) -> Completion:
    """Decode a chat completion's body; of its choices the first."""
    decoded = msgspec.json.decode(body, type=_ChatCompletion)
    choice = decoded.choices[0]
    return Completion(
        id=decoded.id,
        message=choice.message,
        finish_reason=choice.finish_reason or "",
        total_tokens=decoded.usage.total_tokens if decoded.usage else 0,
    )


def _object(arguments: object) -> dict[str, Any] | None:
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            return None
    return arguments if isinstance(arguments, dict) else None
