"""The demo's shop as an environment of the package verifiers; it knows nothing of ForgeMQ.

A customer asks for the total of two or three order lines. The policy looks prices up, adds them up
with a tool, and answers; the rubric gives 1 for the right total.
"""

import json
import random
from typing import Any

import verifiers as vf
from datasets import Dataset
from shop_desk.calls import BAD_CALL, TOOLS, add_up, final_number
from shop_desk.shop import Order, as_task, draw_order, order_of

# Three lines, looked up one by one, take 5: three look-ups, the total, the answer.
TURNS_MAX = 7
LINES = (2, 3)
# Tools that the demo's model knows; the third keeps notes, which a growing list of messages is not.
OFFERED = ("price", "total")


class ShopTools(vf.StatefulToolEnv):  # type: ignore[misc]  # verifiers is not installed always
    """One customer of the shop for each rollout."""

    def __init__(self, **fields: Any) -> None:  # noqa: ANN401 - those of verifiers
        super().__init__(max_turns=TURNS_MAX, error_formatter=lambda _: BAD_CALL, **fields)
        self.add_tool(self.price, args_to_skip=["order"])
        self.add_tool(self.total)
        # Described as in the texts that the demo's model has seen.
        self.oai_tools = [tool for tool in TOOLS if tool["function"]["name"] in OFFERED]

    def update_tool_args(
        self,
        tool_name: str,
        tool_args: dict[str, Any],
        messages: Any,  # noqa: ANN401, ARG002 - of verifiers
        state: Any,  # noqa: ANN401 - of verifiers
        **_: object,
    ) -> dict[str, Any]:
        """Add the customer's order, which the policy does not pass."""
        return {**tool_args, "order": _order(state["info"])} if tool_name == "price" else tool_args

    async def price(self, item: str, order: Order) -> str:
        """Product page of one item."""
        return order.page(item)

    async def total(self, lines: str) -> str:
        """Add up lines: count item price."""
        total = add_up(lines)
        if total is None:
            raise ValueError(f"lines: must be COUNT ITEM PRICE, separated by commas, got {lines!r}")
        return json.dumps({"total": total})


def right_total(completion: list[dict[str, Any]], info: dict[str, Any]) -> float:
    """1 if the last message is an answer whose last number is the right total, else 0."""
    last = completion[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        return 0.0
    return float(final_number(last["content"]) == _order(info).total)


def load_environment(orders: int = 2000, held_out: int = 64, seed: int = 0) -> vf.Environment:
    """The environment with so many orders to train on, and so many held out."""
    return ShopTools(
        dataset=_data_set(orders, seed=seed),
        eval_dataset=_data_set(held_out, seed=seed + 1),
        rubric=vf.Rubric(funcs=[right_total]),
    )


def _data_set(count: int, *, seed: int) -> Dataset:
    choose = random.Random(seed)
    orders = [draw_order(choose, line_counts=LINES) for _ in range(count)]
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": order.question}],
                "info": json.dumps({"order": as_task(order)}),
            }
            for order in orders
        ]
    )


def _order(info: dict[str, Any]) -> Order:
    return order_of(info["order"])
