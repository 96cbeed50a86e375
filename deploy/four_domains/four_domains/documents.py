"""Question answering: a document of names and numbers, and a question for three of them."""

import random
from collections.abc import Iterable, Mapping
from typing import Any

_NAMES = (
    "lamp rope soap drum kite vase comb fork bell sock mug pen jar rug cup mop saw nut bolt "
    "hat bag belt boot bowl cake card coat disk door fan flag"
)
NAMES: tuple[str, ...] = tuple(_NAMES.split())
"""Each is one token of the shop desk's tokenizer."""

NUMBER_MAX = 99
ENTRIES = 8
ASKED = 3


def draw(choose: random.Random) -> dict[str, Any]:
    """A document and a question about it as a task; `wanted` has the right numbers by name."""
    names = choose.sample(NAMES, ENTRIES)
    numbers = {name: choose.randint(2, NUMBER_MAX) for name in names}
    asked = choose.sample(names, ASKED)
    document = ", ".join(entries(numbers, names))
    return {
        "question": f"{document}\nPlease list {', '.join(asked)}.",
        "numbers": numbers,
        "wanted": {name: numbers[name] for name in asked},
    }


def entries(numbers: Mapping[str, int], names: Iterable[str]) -> list[str]:
    """Names with their numbers, as documents and answers have them."""
    return [f"{name} {numbers[name]}" for name in names]


def right(drawn: dict[str, Any]) -> str:
    """The answer without a mistake."""
    return ", ".join(entries(drawn["wanted"], drawn["wanted"]))
