"""The wall clock. A core never reads it: time reaches a core in records and arguments."""

import time


def now_ms() -> int:
    """Wall-clock time, milliseconds since the Unix epoch."""
    return time.time_ns() // 1_000_000
