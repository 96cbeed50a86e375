"""Which tools a client lets the model call: OpenAI's `tool_choice`, which all protocols share."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from forgemq_gateway.core.errors import invalid


class CallChoice(Struct, frozen=True, kw_only=True):
    """Which functions are called.

    Attributes:
        required: One of them must be; () if none must.
        offered: They may be, if none must; None: all.
        is_one: There is one call at most.
        is_unused: The client asks for what is not done; the model chooses among all.
    """

    required: tuple[str, ...] = ()
    offered: tuple[str, ...] | None = None
    is_one: bool = False
    is_unused: bool = False


ANY_CALLS = CallChoice()
_NO_CALLS = CallChoice(offered=())
_UNUSED = CallChoice(is_unused=True)

# `any` is what Anthropic and Mistral call it.
_REQUIRED = ("required", "any")


def chosen(choice: str | Mapping[str, Any], functions: tuple[str, ...]) -> CallChoice:
    """The choice among these functions; one of a kind that is not known is unused.

    Raises:
        RefusedError: 400: a call must be there, and there is no such function.
    """
    if not isinstance(choice, str):
        kind = choice.get("type")
        if kind == "function":
            return _named(choice, functions)
        if kind == "allowed_tools":
            return _allowed(choice, functions)
        choice = kind if isinstance(kind, str) else ""
    if choice in _REQUIRED:
        return CallChoice(required=_some(functions))
    if choice == "none":
        return _NO_CALLS
    return ANY_CALLS if choice == "auto" else _UNUSED


def _some(functions: tuple[str, ...]) -> tuple[str, ...]:
    if not functions:
        raise invalid("tool_choice needs tools that are functions", param="tool_choice")
    return functions


def _named(choice: Mapping[str, Any], functions: tuple[str, ...]) -> CallChoice:
    name = _name_in(choice)
    if name is None:
        raise invalid(
            "tool_choice of type function must name it "
            f'({{"type": "function", "function": {{"name": ...}}}}), got {choice!r}',
            param="tool_choice",
        )
    if name not in _some(functions):
        raise invalid(f"tool_choice names {name!r}, which is not in tools", param="tool_choice")
    return CallChoice(required=(name,), is_one=True)


def _allowed(choice: Mapping[str, Any], functions: tuple[str, ...]) -> CallChoice:
    """Some of the tools, as chat completions (in a field of the same name) or responses say it.

    One of them can be required. If none is, nothing keeps a reply without a form from the others.
    """
    inner = choice.get("allowed_tools")
    said = inner if isinstance(inner, Mapping) else choice
    tools = said.get("tools")
    given = tools if isinstance(tools, Sequence) else ()
    names = [_name_in(tool) or tool.get("name") for tool in given if isinstance(tool, Mapping)]
    allowed = tuple(name for name in functions if name in names)
    if said.get("mode") in _REQUIRED:
        return CallChoice(required=allowed or _some(functions), is_unused=not allowed)
    if not allowed:
        return _UNUSED
    return ANY_CALLS if allowed == functions else CallChoice(offered=allowed)


def _name_in(tool: Mapping[str, Any]) -> str | None:
    """The name of a function, as chat completions have it."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None
