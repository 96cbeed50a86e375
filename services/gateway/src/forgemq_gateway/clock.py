"""Time for the edge; the core gets it as values."""

import time
from dataclasses import dataclass

from forgemq_gateway.core.attempts import Moment
from forgemq_shell.clock import now_ms


@dataclass(frozen=True, slots=True)
class Clock:
    """The system's clocks."""

    def wall_ms(self) -> int:
        """Milliseconds since the Unix epoch."""
        return now_ms()

    def now_s(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def moment(self) -> Moment:
        """Both clocks, read together."""
        return Moment(now_s=self.now_s(), wall_ms=self.wall_ms())
