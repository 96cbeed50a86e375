"""Task k of a run: a pure function of (seed, domain, k)."""

import json
import random
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from four_domains import bookings, documents, programs, reasoning

HELD_OUT = 1_000_000
"""Tasks from this number on are held out: the same for every seed, never trained on."""

HELD_OUT_SEED = "four-domains-held-out"
FOLDS = 5

DRAWS: Mapping[str, Callable[[random.Random], dict[str, Any]]] = {
    "reasoning": reasoning.draw,
    "documents": documents.draw,
    "programs": programs.draw,
    "bookings": bookings.draw,
}
"""By domain, what draws one of its tasks."""


def task(seed: int, domain: str, k: int) -> dict[str, Any]:
    """Task k of a domain."""
    if k >= HELD_OUT:
        return draw(random.Random(f"{HELD_OUT_SEED}/{domain}/{k}"), domain, is_held_out=True)
    return draw(random.Random(f"{seed}/{domain}/{k}"), domain, is_held_out=False)


def draw(choose: random.Random, domain: str, *, is_held_out: bool) -> dict[str, Any]:
    """A task drawn from this generator, of the held-out fold or of the others.

    There are few sums and programs, so two generators would soon draw the same one. The fold
    follows from the task itself, and so does whether it may train.
    """
    while True:
        drawn = DRAWS[domain](choose)
        if (fold_of(drawn) == 0) == is_held_out:
            return drawn


def fold_of(drawn: Mapping[str, Any]) -> int:
    """The fold of a task; fold 0 is held out."""
    return zlib.crc32(json.dumps(drawn, sort_keys=True).encode()) % FOLDS
