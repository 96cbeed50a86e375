"""A white-box agent loop: ask the model, answer its tool calls, manage the context, repeat.

The environment decides what follows an answer: `Append` messages to the history, which may apply
context functions to it, or `Stop`. Context functions are also tools of the policy or rules, as the
agent says (`contexts.py`). So managing the context is part of what the agent does, as in Forge
(arXiv 2605.26494, section 6).
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from msgspec.structs import replace

from forgemq_agents.completion import Completion, FunctionCall, Message, Tool
from forgemq_agents.contexts import AgentContext, Application, ContextRule, ContextTool
from forgemq_agents.errors import ContextFullError
from forgemq_contracts.context_cuts import CUTS_MAX, ContextCut
from forgemq_contracts.fields import TruncationCause

CONTEXT_FULL: TruncationCause = "context_full"
TURN_TOO_LONG: TruncationCause = "turn_too_long"
TOO_MANY_TURNS: TruncationCause = "too_many_turns"

APPLIED_MAX = CUTS_MAX - 2
"""Context functions applied after one turn; further calls change nothing. Rules may add two, and
more as long as a request names no more than `CUTS_MAX`."""

UNWRITTEN_MAX = 3
"""Questions of rules in a row that the policy answered without a text; then no rule asks again."""

CUT = "done"
"""The result of a call that changed the context, if its message is still there."""


@dataclass(frozen=True, slots=True)
class Append:
    """Add the model's message and these to the history, then apply these context functions."""

    messages: Sequence[Message] = ()
    applied: Sequence[Application] = ()


@dataclass(frozen=True, slots=True)
class Stop:
    """End the episode, for this reason."""

    reason: str


Move: TypeAlias = Append | Stop


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

    @property
    def context_tokens_max(self) -> int:
        """Tokens of its context window; 0 if that is not known."""
        ...

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        cuts: Sequence[ContextCut] = (),
    ) -> Completion:
        """Ask the model for the next message; `cuts` says how the messages came to be."""
        ...

    def truncate(self, cause: TruncationCause) -> None:
        """Note that a limit ends the episode."""
        ...


async def run_tool_loop(
    model: ChatModel,
    environment: Environment,
    *,
    turns_max: int,
    context_tools: Sequence[ContextTool] = (),
    context_rules: Sequence[ContextRule] = (),
) -> str:
    """Play until the environment stops; returns why it ended.

    The loop also ends after `turns_max` turns, if the context is full, and if a turn was cut at
    its token limit: half a message is not what the model meant to send. These limits truncate the
    episode. What a rule asks the policy is no turn of the environment, and counts as none.

    Args:
        model: Answers.
        environment: Acts.
        turns_max: Answers that the environment acts on, or that call a context tool.
        context_tools: Offered to the model beside those of the environment, which does not see
            their calls. A call that is malformed is the environment's to answer.
        context_rules: Of those that are due the one with the highest fraction that changes the
            context is applied, once before each turn. A function that needs the policy's words
            changes nothing if the policy writes no text. The size of a context is that of the
            newest request and its answer; what tools said since then counts from the next request
            on. If it does not fit, rules that need no words are applied until it does.
    """
    play = _Play(model, environment, context_tools, context_rules)
    try:
        for _ in range(turns_max):
            reason = await play.turn()
            if reason is not None:
                return reason
    except ContextFullError:
        return _truncated(model, CONTEXT_FULL)
    except _TurnTooLongError:
        return _truncated(model, TURN_TOO_LONG)
    return _truncated(model, TOO_MANY_TURNS)


def _truncated(model: ChatModel, cause: TruncationCause) -> str:
    model.truncate(cause)
    return cause


class _TurnTooLongError(Exception):
    """A turn was cut at its token limit."""


class _Play:
    """An episode under way: its context, and the cuts that the next request names."""

    def __init__(
        self,
        model: ChatModel,
        environment: Environment,
        tools: Sequence[ContextTool],
        rules: Sequence[ContextRule],
    ) -> None:
        self._model = model
        self._environment = environment
        self._own_tools = tools
        self._rules = sorted(rules, key=lambda rule: rule.fraction, reverse=True)
        self._tools = [*environment.tools, *(each.tool for each in tools)]
        self._context = AgentContext(opening=tuple(environment.opening()))
        self._tokens = 0
        self._newest_id: str | None = None
        self._cuts: list[ContextCut] = []
        self._unwritten = 0

    async def turn(self) -> str | None:
        """One answer of the model and what follows; why the episode ends, if it does."""
        await self._apply_due_rule()
        completion = await self._ask_within_rules()
        own = self._own_calls(completion)
        rest = tuple(call for call in completion.calls if call.id not in own)
        move = Append()
        if rest or not own:
            asked = _with_calls(completion, rest) if own else completion
            decided = await self._environment.answer(asked)
            if isinstance(decided, Stop):
                return decided.reason
            move = decided
        results = [_result(call_id) for call_id in own]
        self._context = self._context.after(completion.message, *move.messages, *results)
        for application in (*own.values(), *move.applied)[:APPLIED_MAX]:
            self._apply(application)
        return None

    def _own_calls(self, completion: Completion) -> dict[str, Application]:
        """What the calls of context tools apply, by the id of the call."""
        found = (
            (call.id, tool.called(call)) for call in completion.calls for tool in self._own_tools
        )
        return {call_id: applied for call_id, applied in found if applied is not None}

    def _apply(self, application: Application) -> None:
        """Apply a context function; one that changes nothing is not recorded."""
        context = application.to(self._context)
        if context == self._context:
            return
        self._context = context
        self._cuts.append(application.cut(after_id=self._newest_id))
        self._tokens = 0  # Not known until the next answer.

    async def _apply_due_rule(self) -> None:
        """Apply the first rule that is due and changes the context."""
        window, tokens, before = self._model.context_tokens_max, self._tokens, self._context
        for rule in self._rules:
            if not rule.is_due(tokens, tokens_max=window):
                continue
            asks = rule.function.asks
            text = await self._written(asks) if asks else ""
            if text or not asks:
                self._apply(Application(rule.function, text, rule.parameters, form="rule"))
            if self._context != before:
                return

    async def _written(self, question: str) -> str:
        """What the policy answers to a question behind the context; "" if it writes no text.

        A policy that calls a tool instead has said nothing to go on with: the call is not run, and
        the context stays as it is, without question and answer.
        """
        if self._unwritten == UNWRITTEN_MAX:
            return ""
        size, newest_id = self._tokens, self._newest_id
        text = (await self._ask_within_rules({"role": "user", "content": question})).text
        if text.strip():
            self._unwritten = 0
            return text
        self._unwritten += 1
        self._tokens, self._newest_id = size, newest_id
        return ""

    async def _ask_within_rules(self, *question: Message) -> Completion:
        """Ask for the next turn; while it does not fit, apply rules that need no words."""
        rules = iter([rule for rule in self._rules if not rule.function.asks])
        while True:
            try:
                return await self._ask(self._context.after(*question))
            except ContextFullError:
                if not self._is_cut_by_one_of(rules):
                    raise

    def _is_cut_by_one_of(self, rules: Iterator[ContextRule]) -> bool:
        """Apply these rules, in order, until one changes the context; whether one did."""
        before = self._context
        while self._context == before and len(self._cuts) < CUTS_MAX:
            rule = next(rules, None)
            if rule is None:
                return False
            self._apply(Application(rule.function, "", rule.parameters, form="rule"))
        return self._context != before

    async def _ask(self, context: AgentContext) -> Completion:
        completion = await self._model.chat(context.messages, tools=self._tools, cuts=self._cuts)
        self._cuts = []
        self._tokens = completion.total_tokens
        self._newest_id = completion.completion_id
        if completion.finish_reason == "length":
            raise _TurnTooLongError
        return completion


def _with_calls(completion: Completion, calls: Sequence[FunctionCall]) -> Completion:
    """The completion with these of its calls alone."""
    ids = {call.id for call in calls}
    kept = [call for call in completion.message["tool_calls"] if call["id"] in ids]
    return replace(completion, message={**completion.message, "tool_calls": kept})


def _result(call_id: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": CUT}


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

    running = [asyncio.ensure_future(content(call)) for call in calls]
    try:
        contents = await asyncio.gather(*running)
    finally:
        for each in running:  # If one fails the episode is over, and so is what the others do.
            each.cancel()
    return [
        {"role": "tool", "tool_call_id": call.id, "content": text}
        for call, text in zip(calls, contents, strict=True)
    ]
