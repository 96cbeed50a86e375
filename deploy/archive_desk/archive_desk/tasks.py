"""Task k of a run: a pure function of (seed, domain, k)."""

import random
from typing import Any

from archive_desk.archive import FILE_COUNTS, KINDS, as_task, draw_inquiry

HELD_OUT = 1_000_000
"""Tasks from this number on are held out: the same for every seed, never trained on."""

HELD_OUT_SEED = "archive-desk-held-out"


def task(seed: int, domain: str, k: int) -> dict[str, Any]:
    """Inquiry k. Kinds and numbers of files take turns, so that every step mixes them."""
    name = HELD_OUT_SEED if k >= HELD_OUT else f"{seed}/{domain}"
    kind = KINDS[k % len(KINDS)]
    file_count = FILE_COUNTS[k // len(KINDS) % len(FILE_COUNTS)]
    choose = random.Random(f"{name}/{k}")
    return as_task(draw_inquiry(choose, kind=kind, file_count=file_count))
