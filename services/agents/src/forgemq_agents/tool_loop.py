"""A white-box agent loop: ask the policy, answer its tool calls, manage the context, repeat.

The environment decides what follows an answer: `Append` messages to the history, `Restart` from
new ones (context management is part of the environment's dynamics: Forge, arXiv 2605.26494,
section 6), or `Stop`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from forgemq_agents.completion import Completion, Message, Tool, ToolCall
from forgemq_agents.errors import ContextFullError

CONTEXT_FULL = "context full"
TURN_TOO_LONG = "turn too long"
TOO_MANY_TURNS = "too many turns"


@dataclass(frozen=True, slots=True)
class Append:
    """The history goes on with these messages behind the policy's own."""

    messages: Sequence[Message]


@dataclass(frozen=True, slots=True)
class Restart:
    """The history is dropped; a new one starts with these messages."""

    messages: Sequence[Message]


@dataclass(frozen=True, slots=True)
class Stop:
    """The episode is over, and why."""

    reason: str


Move: TypeAlias = Append | Restart | Stop


class Environment(Protocol):
    """The side of the loop that is not the policy."""

    @property
    def tools(self) -> Sequence[Tool]:
        """Tools offered to the policy, in OpenAI form."""
        ...

    def opening(self) -> Sequence[Message]:
        """The first messages."""
        ...

    async def answer(self, completion: Completion) -> Move:
        """What follows this answer of the policy."""
        ...


class Policy(Protocol):
    """Whoever answers; `Episode` is one."""

    async def chat(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> Completion:
        """The next message."""
        ...


async def run_tool_loop(policy: Policy, environment: Environment, *, turns_max: int) -> str:
    """Play until the environment stops; returns why it ended.

    Ends by itself after `turns_max` turns, where the context is full, and where a turn was cut at
    its token limit (a cut turn is no message the policy meant to send).
    """
    messages = list(environment.opening())
    for _ in range(turns_max):
        try:
            completion = await policy.chat(messages, tools=environment.tools)
        except ContextFullError:
            return CONTEXT_FULL
        if completion.finish_reason == "length":
            return TURN_TOO_LONG
        move = await environment.answer(completion)
        if isinstance(move, Stop):
            return move.reason
        if isinstance(move, Restart):
            messages = list(move.messages)
        else:
            messages += [completion.message, *move.messages]
    return TOO_MANY_TURNS


ToolFunction: TypeAlias = Callable[[Mapping[str, Any]], Awaitable[str]]


async def answer_calls(
    calls: Sequence[ToolCall], functions: Mapping[str, ToolFunction], *, bad_call: str
) -> list[Message]:
    """Run all calls at once; one tool message for each, in the order of the calls.

    Args:
        calls: Of one completion.
        functions: By tool name; each takes the arguments object.
        bad_call: Answer to a call of no such tool, or with arguments that are no JSON object.
    """

    async def content(call: ToolCall) -> str:
        function = functions.get(call.name)
        if function is None or call.arguments is None:
            return bad_call
        return await function(call.arguments)

    contents = await asyncio.gather(*(content(call) for call in calls))
    return [
        {"role": "tool", "tool_call_id": call.id, "content": text}
        for call, text in zip(calls, contents, strict=True)
    ]
