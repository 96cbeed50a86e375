"""Tool time of an episode by the agent's own clock, with tools and sub-agents at once."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ToolClock:
    """Seconds in which a tool ran and no completion was awaited.

    Engine time is on the record of each completion, and the gateway adds up its critical path. So
    what tools add to it is the time in which nothing was sampled: tools that run at once count
    once, and a tool beside another agent's turn counts nothing.

    Example: two tools from 0 s to 3 s and from 1 s to 5 s, a turn from 4 s to 6 s: 4 s.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Start at 0 s."""
        self._clock_s = clock_s
        self._tools = 0
        self._turns = 0
        self._counted_s = 0.0
        self._since_s = clock_s()

    @property
    def total_s(self) -> float:
        """Tool time so far, seconds."""
        self._count()
        return self._counted_s

    @contextmanager
    def tool(self) -> Iterator[None]:
        """A tool runs during the block."""
        self._count()
        self._tools += 1
        try:
            yield
        finally:
            self._count()
            self._tools -= 1

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A completion is awaited during the block."""
        self._count()
        self._turns += 1
        try:
            yield
        finally:
            self._count()
            self._turns -= 1

    def _count(self) -> None:
        now_s = self._clock_s()
        if self._tools and not self._turns:
            self._counted_s += now_s - self._since_s
        self._since_s = now_s
