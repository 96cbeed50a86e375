"""The desk's tools, and how calls are read from the model's text. Pure."""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from shop_desk.shop import ITEMS, Order

ARGUMENT = {"price": "item", "total": "lines", "note": "text"}
BAD_CALL = '{"error": "bad call"}'
NO_ITEM = '{"error": "no item"}'


def _tool(name: str, description: str) -> dict[str, Any]:
    properties = {ARGUMENT[name]: {"type": "string"}}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": properties},
        },
    }


TOOLS = (
    _tool("price", "product page of one item"),
    _tool("total", "add up lines: count item price"),
    _tool("note", "keep this text, clear the pages"),
)


class Call(NamedTuple):
    """A call of an existing tool with its one argument."""

    name: str
    argument: str


_BLOCK = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
_MARKUP = re.compile(r"</?tool_call>")


def call_markup(name: str, arguments: Mapping[str, str]) -> str:
    """A well-formed call of a tool, as the model writes it."""
    fields = json.dumps({"name": name, "arguments": dict(arguments)})
    return f"<tool_call>\n{fields}\n</tool_call>"


def call_of(name: object, arguments: object) -> Call | None:
    """The call; None if there is no such tool, or if `arguments` is not its one text argument."""
    if not isinstance(name, str) or name not in ARGUMENT or not isinstance(arguments, dict):
        return None
    if set(arguments) != {ARGUMENT[name]}:
        return None
    argument = arguments[ARGUMENT[name]]
    return Call(name, argument) if isinstance(argument, str) else None


def read_calls(text: str) -> list[Call | None]:
    """Calls in a sampled turn, None for each malformed one; [] if the turn is an answer."""
    if not _MARKUP.search(text):
        return []
    calls = [_call_in(block) for block in _BLOCK.findall(text)]
    if _BLOCK.sub("", text).strip() or not calls:
        calls.append(None)
    return calls


def unread_calls(text: str, *, has_calls: bool) -> int:
    """Number of malformed calls in the text that the gateway did not read as calls."""
    if not has_calls:
        return len(read_calls(text))
    return len(_BLOCK.findall(text)) + bool(_BLOCK.sub("", text).strip())


def add_up(lines: str) -> int | None:
    """Total of "count item price, count item price"; None if a line has another form."""
    total = 0
    for line in lines.split(", "):
        parts = line.split(" ")
        if len(parts) != 3 or not (parts[0].isdecimal() and parts[2].isdecimal()):
            return None
        total += int(parts[0]) * int(parts[2])
    return total


def is_bad(call: Call | None) -> bool:
    """Whether a call is malformed: unreadable, or a total of lines that do not add up."""
    return call is None or (call.name == "total" and add_up(call.argument) is None)


def reply_to(call: Call | None, order: Order) -> str:
    """The desk's reply to a price or total call."""
    if call is None or is_bad(call):
        return BAD_CALL
    if call.name == "total":
        return json.dumps({"total": add_up(call.argument)})
    return order.page(call.argument) if call.argument in ITEMS else NO_ITEM


def final_number(text: str) -> int | None:
    """The last number in an answer; None if it has no number."""
    numbers = re.findall(r"\d+", text)
    return int(numbers[-1]) if numbers else None


def _call_in(block: str) -> Call | None:
    try:
        fields = json.loads(block)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    return call_of(fields.get("name"), fields.get("arguments"))
