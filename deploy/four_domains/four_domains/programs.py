"""Code: a function of a list, described in two words and a number, run on hidden examples."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

READINGS: Mapping[str, tuple[str, Callable[[Sequence[int]], int]]] = {
    "sum": ("sum", sum),
    "large": ("max", max),
    "small": ("min", min),
    "count": ("len", len),
}
"""By word of the description: the function of Python, and what it does."""

CHANGES: Mapping[str, tuple[str, Callable[[int, int], int]]] = {
    "add": ("+", lambda value, number: value + number),
    "product": ("*", lambda value, number: value * number),
    "clear": ("-", lambda value, number: value - number),
}
"""By word of the description: the operator, and what it does."""

NUMBER_MAX = 99
EXAMPLES = ([3, 9, 4], [7], [2, 2, 8, 5], [12, 1], [6, 30, 11, 5, 20])
"""Hidden examples. No two readings and no two changes agree on all of them."""

FUNCTION = "f"
TABLE = "table"
"""A function that the grader adds: it calls the policy's for every example in one program."""


def draw(choose: random.Random) -> dict[str, Any]:
    """A description as a task; `tests` is what the grader runs."""
    reading, change = choose.choice(list(READINGS)), choose.choice(list(CHANGES))
    number = choose.randint(2, NUMBER_MAX)
    returns = [CHANGES[change][1](READINGS[reading][1](one), number) for one in EXAMPLES]
    arguments = [[list(one) for one in EXAMPLES]]
    return {
        "question": f"Please code {reading}, {change} {number}.",
        "reading": reading,
        "change": change,
        "number": number,
        "tests": [{"function": TABLE, "arguments": arguments, "returns": returns}],
    }


def program(reading: str, change: str, number: int) -> str:
    """The function in Python."""
    return f"def {FUNCTION}(a): return {READINGS[reading][0]}(a){CHANGES[change][0]}{number}"


def with_table(code: str) -> str:
    """The program with the function that the tests call; "" if there is no program."""
    if not code.strip():
        return ""
    return f"{code}\n\ndef {TABLE}(lists): return [{FUNCTION}(one) for one in lists]\n"


def right(drawn: dict[str, Any]) -> str:
    """The program without a mistake."""
    return program(drawn["reading"], drawn["change"], drawn["number"])
