"""Time for the edge; the core gets it as values."""

import time
from dataclasses import dataclass

from forgemq_gateway.core.attempts import Moment
from forgemq_shell.clock import now_ms


@dataclass(frozen=True, slots=True)
class Clock:
    """The system's clocks."""

    wall_ms = staticmethod(now_ms)
    """Milliseconds since the Unix epoch."""

    now_s = staticmethod(time.monotonic)
    """Monotonic seconds."""

    def moment(self) -> Moment:
        """Both clocks, read together."""
        return Moment(now_s=self.now_s(), wall_ms=self.wall_ms())
