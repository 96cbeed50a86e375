"""Task k of a run: orders of two and three lines, a pure function of (seed, domain, k)."""

import random
from typing import Any

from shop_desk.shop import as_task, draw_order
from shop_desk.tasks import HELD_OUT, HELD_OUT_SEED

LINES = (2, 3)


def task(seed: int, domain: str, k: int) -> dict[str, Any]:
    """Order k; from 1,000,000 on they are held out, the same for every seed."""
    if k >= HELD_OUT:
        choose = random.Random(HELD_OUT_SEED + k - HELD_OUT)
        return as_task(draw_order(choose, line_counts=LINES))
    choose = random.Random(f"{seed}/{domain}/{k}")
    return as_task(draw_order(choose, line_counts=(LINES[k % len(LINES)],)))
