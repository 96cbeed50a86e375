"""The desk as an environment: tools, a virtual clock, and the note that clears the pages."""

from collections.abc import Mapping, Sequence
from typing import Any

from forgemq_agents import Completion, Message, Tool
from forgemq_agents.contexts import NOTES
from forgemq_agents.tool_loop import Append, Move, Stop, answer_calls
from shop_desk.calls import BAD_CALL, TOOLS, Call, call_of, is_bad, reply_to, unread_calls
from shop_desk.shop import Order

# Four lines, looked up one by one, take 7: four look-ups, a note, the total, the answer.
TURNS_MAX = 9
# Virtual seconds. Calls of one turn run in parallel, so its longest call decides its duration.
TURN_S = 0.4
BAD_CALL_S = 0.1
TOOL_S = {"price": 1.0, "total": 0.3, "note": 0.1}

ANSWERED = "answered"


class ShopDesk:
    """The desk with one customer; `clock_s` is its virtual clock, `notes` counts notes."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self.notes = 0
        self.clock_s = 0.0
        self.prices_at_once_max = 0
        self.price_calls = 0
        self.bad_calls = 0

    @property
    def tools(self) -> Sequence[Tool]:
        """Tools offered to the model, the same in every turn."""
        return TOOLS

    def opening(self) -> list[Message]:
        """The first message of a context: the customer's question; notes come to its end."""
        return [{"role": "user", "content": self._order.question}]

    async def answer(self, completion: Completion) -> Move:
        """Run the turn's calls at once; a note leaves only the question and the notes."""
        self.clock_s += TURN_S
        calls = [call_of(call.name, call.arguments) for call in completion.calls]
        unread = unread_calls(completion.text, has_calls=bool(calls))
        if not calls and not unread:
            return Stop(ANSWERED)
        self._count(calls, unread)
        noted = [call.argument for call in calls if call is not None and call.name == "note"]
        if noted:
            self.notes += len(noted)
            return Append(applied=[NOTES.application(text) for text in noted])
        answers = await answer_calls(
            completion.calls, {"price": self._price, "total": self._total}, bad_call=BAD_CALL
        )
        return Append([*answers, *(_answer_unread(number) for number in range(unread))])

    async def _price(self, arguments: Mapping[str, Any]) -> str:
        return reply_to(call_of("price", arguments), self._order)

    async def _total(self, arguments: Mapping[str, Any]) -> str:
        return reply_to(call_of("total", arguments), self._order)

    def _count(self, calls: Sequence[Call | None], unread: int) -> None:
        prices = sum(call is not None and call.name == "price" for call in calls)
        self.price_calls += prices
        self.prices_at_once_max = max(self.prices_at_once_max, prices)
        self.bad_calls += unread + sum(is_bad(call) for call in calls)
        spent = [BAD_CALL_S if call is None else TOOL_S[call.name] for call in calls]
        self.clock_s += max([*spent, *([BAD_CALL_S] if unread else [])])


def _answer_unread(number: int) -> Message:
    """The answer to text that could not be read as a call, under a made-up call id."""
    return {"role": "tool", "tool_call_id": f"unread-{number}", "content": BAD_CALL}
