"""A tool-using agent: look up the codes of one or two items, book each, then say that it is done.

Codes are on pages with other numbers, and a booking needs the code, so looking up comes first.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from shop_desk.calls import call_markup

from forgemq_agents import Completion, Message, Tool
from forgemq_agents.tool_loop import Append, Move, Stop, answer_calls
from four_domains.documents import NAMES

COUNTS = (1, 2)
CODE_MIN, CODE_MAX = 10, 99

# Two items take 2 pages, 2 bookings and the answer; the rest is for calls that are repeated.
TURNS_MAX = 7

DONE = "all"
"""What the agent says at the end."""

ANSWERED = "answered"
BAD_CALL = '{"error": "bad call"}'
NO_ITEM = '{"error": "no item"}'
BOOKED = "product"
_MARKUP = "tool_call>"

ARGUMENT = {"page": "item", "book": "code"}


def _tool(name: str) -> Tool:
    properties = {ARGUMENT[name]: {"type": "string"}}
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
    }


TOOLS = tuple(_tool(name) for name in ARGUMENT)


def draw(choose: random.Random) -> dict[str, Any]:
    """A visitor's wish as a task; `codes` has the code of each wanted item."""
    items = choose.sample(NAMES, choose.choice(COUNTS))
    codes = choose.sample(range(CODE_MIN, CODE_MAX + 1), len(items))
    return {
        "question": f"Please book {', '.join(items)}.",
        "codes": {item: str(code) for item, code in zip(items, codes, strict=True)},
        "pages_seed": choose.getrandbits(48),
    }


def page(drawn: Mapping[str, Any], item: str) -> str:
    """The page of an item: its code among other numbers."""
    choose = random.Random(f"{drawn['pages_seed']}/{item}")
    others = [choose.randint(CODE_MIN, CODE_MAX) for _ in range(3)]
    code = drawn["codes"].get(item, str(others[0]))
    return f"{item} stock {others[1]}, code {code}, shelf {others[2]}"


def call_text(name: str, argument: str) -> str:
    """A well-formed call of `page` or `book`, as the model writes it."""
    return call_markup(name, {ARGUMENT[name]: argument})


def argument_of(name: object, arguments: object) -> str | None:
    """The one argument of a call; None if there is no such tool, or it has others."""
    if name not in ARGUMENT or not isinstance(arguments, Mapping):
        return None
    value = arguments.get(ARGUMENT[str(name)])
    return value if len(arguments) == 1 and isinstance(value, str) else None


class BookingDesk:
    """The desk with one visitor; `booked` has the codes that were booked, in their order."""

    def __init__(self, drawn: Mapping[str, Any]) -> None:
        self._drawn = drawn
        self.booked: list[str] = []

    @property
    def tools(self) -> Sequence[Tool]:
        """Tools offered to the model, the same in every turn."""
        return TOOLS

    def opening(self) -> list[Message]:
        """The visitor's wish."""
        return [{"role": "user", "content": self._drawn["question"]}]

    async def answer(self, completion: Completion) -> Move:
        """Do what the turn asks for; a turn without a call ends the episode."""
        if completion.calls:
            tools = {"page": self._page, "book": self._book}
            return Append(await answer_calls(completion.calls, tools, bad_call=BAD_CALL))
        if _MARKUP in completion.text:
            return Append([{"role": "tool", "tool_call_id": "unread", "content": BAD_CALL}])
        return Stop(ANSWERED)

    async def _page(self, arguments: Mapping[str, Any]) -> str:
        item = argument_of("page", arguments)
        if item is None:
            return BAD_CALL
        return page(self._drawn, item) if item in NAMES else NO_ITEM

    async def _book(self, arguments: Mapping[str, Any]) -> str:
        code = argument_of("book", arguments)
        if code is None:
            return BAD_CALL
        self.booked.append(code)
        return BOOKED
