"""How long one request is held in all without a byte sent: its waits share one hold, then 429."""

from collections.abc import Iterator
from contextlib import contextmanager

from forgemq_gateway.clock import Clock
from forgemq_gateway.wire import Scope

# Beside what ASGI puts into a scope.
_HELD_S = "forgemq.held_s"


def held_s(scope: Scope) -> float:
    """Seconds that this request was held so far."""
    held: float = scope.get(_HELD_S, 0.0)
    return held


class Hold:
    """The hold of every request, of which each wait takes its part.

    Time in which a body arrives or is made into tokens is no part of it: a slow client's turn may
    wait for a lane as long as any other.
    """

    def __init__(self, limit_s: float, *, clock: Clock) -> None:
        self._limit_s = limit_s
        self._clock = clock

    @contextmanager
    def waiting(self, scope: Scope) -> Iterator[float]:
        """Within it the request is held; yields for how long it may be."""
        before_s, began_s = held_s(scope), self._clock.now_s()
        try:
            yield max(0.0, self._limit_s - before_s)
        finally:
            scope[_HELD_S] = before_s + self._clock.now_s() - began_s
