"""A white-box agent loop: ask the model, answer its tool calls, manage the context, repeat.

The environment decides what follows an answer: `Append` messages to the history, `Restart` with
new ones, or `Stop`. So context management is part of the environment, as in Forge (arXiv
2605.26494, section 6).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from forgemq_agents.completion import Completion, FunctionCall, Message, Tool
from forgemq_agents.errors import ContextFullError
from forgemq_contracts.fields import TruncationCause

CONTEXT_FULL: TruncationCause = "context_full"
TURN_TOO_LONG: TruncationCause = "turn_too_long"
TOO_MANY_TURNS: TruncationCause = "too_many_turns"


@dataclass(frozen=True, slots=True)
class Append:
    """Add the model's message and these to the history."""

    messages: Sequence[Message]


@dataclass(frozen=True, slots=True)
class Restart:
    """Drop the history and start with these messages."""

    messages: Sequence[Message]


@dataclass(frozen=True, slots=True)
class Stop:
    """End the episode, for this reason."""

    reason: str


Move: TypeAlias = Append | Restart | Stop


class Environment(Protocol):
    """What the model acts on: it offers tools and answers their calls."""

    @property
    def tools(self) -> Sequence[Tool]:
        """Tools offered to the model, in OpenAI form."""
        ...

    def opening(self) -> Sequence[Message]:
        """The messages before the first completion."""
        ...

    async def answer(self, completion: Completion) -> Move:
        """Act on the model's answer; returns how the episode goes on."""
        ...


class ChatModel(Protocol):
    """The model as the loop needs it; `Episode` is one."""

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Completion:
        """Ask the model for the next message."""
        ...

    def truncate(self, cause: TruncationCause) -> None:
        """Note that a limit ends the episode."""
        ...


async def run_tool_loop(model: ChatModel, environment: Environment, *, turns_max: int) -> str:
    """Play until the environment stops; returns why it ended.

    The loop also ends after `turns_max` turns, if the context is full, and if a turn was cut at
    its token limit: half a message is not what the model meant to send. These limits truncate the
    episode.
    """
    messages = list(environment.opening())
    for _ in range(turns_max):
        try:
            completion = await model.chat(messages, tools=environment.tools)
        except ContextFullError:
            return _truncated(model, CONTEXT_FULL)
        if completion.finish_reason == "length":
            return _truncated(model, TURN_TOO_LONG)
        move = await environment.answer(completion)
        if isinstance(move, Stop):
            return move.reason
        if isinstance(move, Restart):
            messages = list(move.messages)
        else:
            messages += [completion.message, *move.messages]
    return _truncated(model, TOO_MANY_TURNS)


def _truncated(model: ChatModel, cause: TruncationCause) -> str:
    model.truncate(cause)
    return cause


ToolFunction: TypeAlias = Callable[[Mapping[str, Any]], Awaitable[str]]


async def answer_calls(
    calls: Sequence[FunctionCall], functions: Mapping[str, ToolFunction], *, bad_call: str
) -> list[Message]:
    """Run all calls at once; returns one tool message for each, in the order of the calls.

    Args:
        calls: The calls of one completion.
        functions: By tool name; each takes the arguments object.
        bad_call: Answer to a call of an unknown tool, or whose arguments are not a JSON object.
    """

    async def content(call: FunctionCall) -> str:
        function = functions.get(call.name)
        if function is None or call.arguments is None:
            return bad_call
        return await function(call.arguments)

    contents = await asyncio.gather(*(content(call) for call in calls))
    return [
        {"role": "tool", "tool_call_id": call.id, "content": text}
        for call, text in zip(calls, contents, strict=True)
    ]
