"""The wall clock, in the unit of every `_ms` field of a record that holds a moment."""

import time


def now_ms() -> int:
    """Milliseconds since the Unix epoch."""
    return time.time_ns() // 1_000_000
