"""Context functions s' = f(s, a, o): what an agent makes of its messages when they grow too long.

As in Forge, managing the context is an action of the agent ("The MiniMax-M2 Series", arXiv
2605.26494, section 6): s is the context, a the model's answer, o what the tools said to it, and s'
the context of the next request. A context function is pure. It is used in two forms: as a tool
that the policy may call (`as_tool`), and as a rule that holds at a fraction of the context window
(`at`). `tool_loop.py` applies both, and tells the gateway, which records it with the turn.

A function may keep text in the policy's own words, as a note or a summary: as a tool it is the
call's argument, under a rule it is what the policy answers to a question. That answer is a
completion of the episode as any other: it is sampled, recorded and trained.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from forgemq_agents.completion import FunctionCall, Message, Tool
from forgemq_contracts.context_cuts import ContextCut, CutForm

Parameters: TypeAlias = Mapping[str, bool | int | float | str]


@dataclass(frozen=True, slots=True)
class AgentContext:
    """The messages of an episode's next request, in three parts.

    Attributes:
        opening: The task, which no ready function drops.
        kept: What the policy has kept in its own words; "" if nothing.
        turns: What follows: the model's messages, each with what answers it.
    """

    opening: tuple[Message, ...]
    kept: str = ""
    turns: tuple[Message, ...] = ()

    @property
    def messages(self) -> list[Message]:
        """All messages; what is kept ends the task, because templates want roles to alternate."""
        if not self.kept:
            return [*self.opening, *self.turns]
        *before, last = self.opening or ({"role": "user", "content": ""},)
        if last["role"] != "user" or not isinstance(last["content"], str):
            return [*self.opening, {"role": "user", "content": self.kept}, *self.turns]
        text = f"{last['content']}\n{self.kept}" if last["content"] else self.kept
        return [*before, {**last, "content": text}, *self.turns]

    def after(self, *messages: Message) -> "AgentContext":
        """The context with these messages at its end."""
        return replace(self, turns=(*self.turns, *messages))


Apply: TypeAlias = Callable[[AgentContext, str, Parameters], AgentContext]
"""s' of s with a and o at its end, what the policy wrote for it ("" for nothing), parameters."""


@dataclass(frozen=True, slots=True)
class ContextFunction:
    """A context function by name; make one of your own as the ready ones are made.

    Attributes:
        name: Recorded with each application, and the tool's name.
        apply: The function itself.
        says: What the tool does, for the policy.
        asks: What a rule asks the policy; "" for a function that needs no words of it.
        defaults: Its parameters, and their values if none are given.
    """

    name: str
    apply: Apply
    says: str
    asks: str = ""
    defaults: Parameters = field(default_factory=dict)

    def application(self, text: str = "", /, **parameters: bool | float | str) -> "Application":
        """The function with what the policy wrote for it, by its own call."""
        return Application(self, text, self._with(parameters))

    def as_tool(self, **parameters: bool | float | str) -> "ContextTool":
        """The function as a tool that the policy may call."""
        return ContextTool(self, self._with(parameters))

    def at(self, fraction: float = 0.3, **parameters: bool | float | str) -> "ContextRule":
        """The function as a rule: it is applied once the context fills this much of its window."""
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction: must be above 0 and at most 1, got {fraction:g}")
        return ContextRule(self, fraction, self._with(parameters))

    def _with(self, parameters: Parameters) -> Parameters:
        unknown = sorted(parameters.keys() - self.defaults.keys())
        if unknown:
            known = ", ".join(sorted(self.defaults)) or "none"
            raise ValueError(f"{unknown[0]}: no parameter of {self.name}, which has {known}")
        return {**self.defaults, **parameters}


@dataclass(frozen=True, slots=True)
class ContextTool:
    """A context function that the policy may call."""

    function: ContextFunction
    parameters: Parameters

    @property
    def tool(self) -> Tool:
        """The tool as it is offered, in OpenAI's form."""
        wanted = ["text"] if self.function.asks else []
        return {
            "type": "function",
            "function": {
                "name": self.function.name,
                "description": self.function.says,
                "parameters": {
                    "type": "object",
                    "properties": {name: {"type": "string"} for name in wanted},
                    "required": wanted,
                },
            },
        }

    def called(self, call: FunctionCall) -> "Application | None":
        """What this call applies; None if it is no well-formed call of this tool."""
        wanted = {"text"} if self.function.asks else set()
        if call.name != self.function.name or call.arguments is None:
            return None
        if call.arguments.keys() != wanted:
            return None
        text = call.arguments.get("text", "")
        return Application(self.function, text, self.parameters) if isinstance(text, str) else None


@dataclass(frozen=True, slots=True)
class ContextRule:
    """A context function that is applied once the context fills a fraction of its window."""

    function: ContextFunction
    fraction: float
    parameters: Parameters

    def is_due(self, tokens: int, *, tokens_max: int) -> bool:
        """Whether a context of so many tokens is to be cut; never if the window is not known."""
        return tokens_max > 0 and tokens >= self.fraction * tokens_max


@dataclass(frozen=True, slots=True)
class Application:
    """One context function with everything but the context: f(., a, o).

    Attributes:
        function: What is applied.
        text: What the policy wrote for it; "" if it needs no words.
        parameters: Beside that.
        form: Who decided: the policy, by a call, or the agent.
    """

    function: ContextFunction
    text: str = ""
    parameters: Parameters = field(default_factory=dict)
    form: CutForm = "tool"

    def to(self, context: AgentContext) -> AgentContext:
        """The context that follows."""
        return self.function.apply(context, self.text, self.parameters)

    def cut(self, *, after_id: str | None) -> ContextCut:
        """What is recorded of it; `after_id` is the newest completion of the cut context."""
        return ContextCut(
            function=self.function.name,
            form=self.form,
            after_id=after_id,
            is_written=bool(self.text),
            parameters=dict(self.parameters),
        )


def exchanges(turns: Sequence[Message]) -> list[tuple[Message, ...]]:
    """The turns, cut before each message of the model: a call is never apart from its results."""
    found: list[list[Message]] = []
    for message in turns:
        if message["role"] == "assistant" or not found:
            found.append([])
        found[-1].append(message)
    return [tuple(exchange) for exchange in found]


def _sliding_window(context: AgentContext, _: str, parameters: Parameters) -> AgentContext:
    found = exchanges(context.turns)
    kept = found[max(0, len(found) - int(parameters["exchanges"])) :]
    return replace(context, turns=tuple(each for exchange in kept for each in exchange))


def _clear_tool_results(context: AgentContext, _: str, parameters: Parameters) -> AgentContext:
    found = exchanges(context.turns)
    first_whole = len(found) - int(parameters["exchanges"])
    return replace(
        context,
        turns=tuple(
            {**each, "content": parameters["text"]}
            if each["role"] == "tool" and index < first_whole
            else each
            for index, exchange in enumerate(found)
            for each in exchange
        ),
    )


def _summary(context: AgentContext, text: str, parameters: Parameters) -> AgentContext:
    return replace(context, kept=f"{parameters['heading']}{text}", turns=())


def _discard_all(context: AgentContext, _: str, _parameters: Parameters) -> AgentContext:
    return replace(context, turns=())


def _notes(context: AgentContext, text: str, parameters: Parameters) -> AgentContext:
    begun = f"{context.kept}{parameters['separator']}" if context.kept else parameters["heading"]
    return replace(context, kept=f"{begun}{text}", turns=())


SLIDING_WINDOW = ContextFunction(
    name="sliding_window",
    apply=_sliding_window,
    says="Forget all but the newest turns.",
    defaults={"exchanges": 3},
)
"""The task and the newest exchanges, each a message of the model and what answered it."""

CLEAR_TOOL_RESULTS = ContextFunction(
    name="clear_tool_results",
    apply=_clear_tool_results,
    says="Forget what tools have answered, but for the newest turns.",
    defaults={"exchanges": 1, "text": "(cleared)"},
)
"""All messages, the results of tools replaced by a word but for the newest exchanges."""

SUMMARY = ContextFunction(
    name="summary",
    apply=_summary,
    says="Go on with nothing but the task and this summary of everything so far.",
    asks="Summarise everything so far that you need to go on. The rest will be forgotten.",
    defaults={"heading": "Summary: "},
)
"""The task and the policy's summary, which replaces an earlier one."""

DISCARD_ALL = ContextFunction(
    name="discard_all", apply=_discard_all, says="Go on with nothing but the task."
)
"""The task, and what was kept before: nothing else. A rule for it holds at 0.3 as published."""

NOTES = ContextFunction(
    name="note",
    apply=_notes,
    says="Keep this text and forget everything else but the task and earlier notes.",
    asks="Note what you need of this, without what is in your notes. The rest will be forgotten.",
    defaults={"heading": "Notes: ", "separator": ", "},
)
"""The task and the policy's notes, to which this one is added."""

READY: Mapping[str, ContextFunction] = {
    function.name: function
    for function in (SLIDING_WINDOW, CLEAR_TOOL_RESULTS, SUMMARY, DISCARD_ALL, NOTES)
}
"""The ready functions by name."""
