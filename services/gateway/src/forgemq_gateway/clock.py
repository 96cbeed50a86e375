"""Time for the edge; the core gets it as values."""

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """The system's clocks."""

    def wall_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        return time.time_ns() // 1_000_000

    def now_s(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()
