"""Task k of a run: a pure function of (seed, domain, k)."""

import random
from typing import Any

from shop_desk.shop import LINES, as_task, draw_order

HELD_OUT = 1_000_000
"""Tasks from this number on are held out: the same for every seed, never trained on."""

HELD_OUT_SEED = 10_000


def task(seed: int, domain: str, k: int) -> dict[str, Any]:
    """Order k. Training orders have 2, 3, 4, 2, 3, 4... lines, so every step mixes them."""
    if k >= HELD_OUT:
        return as_task(draw_order(random.Random(HELD_OUT_SEED + k - HELD_OUT)))
    choose = random.Random(f"{seed}/{domain}/{k}")
    return as_task(draw_order(choose, line_counts=(LINES[k % len(LINES)],)))
