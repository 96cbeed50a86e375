"""Reasoning: sums of three or four small numbers, with the steps written before the answer."""

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

COUNTS = (3, 4)
NUMBER_MAX = 5


def draw(choose: random.Random) -> dict[str, Any]:
    """A sum as a task; `answer` is what the mathematics grader compares with."""
    numbers = [choose.randint(1, NUMBER_MAX) for _ in range(choose.choice(COUNTS))]
    asked = ", ".join(str(number) for number in numbers)
    return {
        "question": f"Please add {asked}.",
        "numbers": numbers,
        "answer": str(sum(numbers)),
    }


def worked(numbers: Sequence[int], totals: Sequence[int]) -> str:
    """The steps that lead to these totals, and the answer: "3+5=8, 8+4=12. The total is 12."."""
    steps = [
        f"{before}+{number}={after}"
        for number, (before, after) in zip(numbers[1:], pairwise(totals), strict=True)
    ]
    return f"{', '.join(steps)}. The total is {totals[-1]}."


def right(drawn: dict[str, Any]) -> str:
    """The answer without a mistake."""
    return worked(drawn["numbers"], list(accumulate(drawn["numbers"])))
