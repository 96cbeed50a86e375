"""The shop: orders, prices and product pages. Pure; everything follows from the order.

A customer asks for the total of 2-4 order lines. Prices are on noisy product pages, so they must be
looked up, and the pages of a big order do not fit into the model's context window together.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_ITEM_NAMES = (
    "lamp rope soap drum kite vase comb fork bell sock mug pen jar rug cup mop saw nut bolt "
    "hat bag belt book boot bowl cake card coat disk door fan flag glue harp iron kilt lock "
    "mask oven pipe"
)
ITEMS: tuple[str, ...] = tuple(_ITEM_NAMES.split())
COLORS = ("red", "blue", "green", "black", "white", "gray")
SIZES = ("tiny", "small", "medium", "large")
PHRASES = (
    "Order: {order}. What is the total?",
    "I want {order}. How much is it?",
    "Please price this list: {order}.",
    "How much for {order}?",
)
LINES = (2, 3, 4)


@dataclass(frozen=True, slots=True)
class Line:
    """One order line: a count of one item."""

    count: int
    item: str


@dataclass(frozen=True, slots=True)
class Order:
    """What one customer asks; `shop_seed` decides prices and pages."""

    lines: tuple[Line, ...]
    phrase: str
    shop_seed: int

    @property
    def question(self) -> str:
        """The customer's question."""
        return self.phrase.format(
            order=", ".join(f"{line.count} {line.item}" for line in self.lines)
        )

    @property
    def prices(self) -> dict[str, int]:
        """Price of every item in this customer's shop."""
        choose = random.Random(self.shop_seed)
        return {item: choose.randint(2, 99) for item in ITEMS}

    @property
    def total(self) -> int:
        """The right answer."""
        prices = self.prices
        return sum(line.count * prices[line.item] for line in self.lines)

    def page(self, item: str) -> str:
        """Product page: the price among other numbers."""
        choose = random.Random(f"{self.shop_seed}{item}")
        return (
            f"{item} {self.prices[item]}, color {choose.choice(COLORS)}, "
            f"size {choose.choice(SIZES)}, shelf {choose.randint(1, 9)}, "
            f"stock {choose.randint(10, 99)}, code {choose.randint(10, 99)}"
        )


def draw_order(choose: random.Random, *, line_counts: Sequence[int] = LINES) -> Order:
    """An order drawn from this generator, with one of these numbers of lines."""
    count = choose.choice(line_counts)
    lines = tuple(Line(choose.randint(1, 9), item) for item in choose.sample(ITEMS, count))
    return Order(lines, choose.choice(PHRASES), choose.getrandbits(48))


def as_task(order: Order) -> dict[str, Any]:
    """The order as JSON."""
    return {
        "lines": [[line.count, line.item] for line in order.lines],
        "phrase": order.phrase,
        "shop_seed": order.shop_seed,
    }


def order_of(task: dict[str, Any]) -> Order:
    """The order in a task."""
    lines = tuple(Line(count, item) for count, item in task["lines"])
    return Order(lines, task["phrase"], task["shop_seed"])
