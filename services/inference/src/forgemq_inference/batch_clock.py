"""How many requests an engine had beside one another, as a mean over any span of time."""

import time
from typing import NamedTuple

from forgemq_contracts.weights import EngineLoad


class BatchMoment(NamedTuple):
    """A time, and the seconds of all requests in the engine summed up to then."""

    at_s: float
    requests_s: float


class BatchClock:
    """Sums the time that requests spend in an engine, and knows how its steps grow with them.

    Lifecycle: `note` each change of their number, `note_load` each measurement of the engine.
    Example: 1 request from 10 s on and 3 from 12 s on; from the moment at 10 s to that at 14 s the
    mean is 2.
    """

    def __init__(self) -> None:
        """Start with no request and an engine that was not measured."""
        self._running = 0
        self._summed = BatchMoment(time.monotonic(), 0.0)
        self.load: EngineLoad | None = None

    def note(self, running: int) -> None:
        """Take in that so many requests are in the engine from now on."""
        self._summed, self._running = self.now(), running

    def note_load(self, load: EngineLoad | None) -> None:
        """Take in how fast the engine is; None leaves it as it was."""
        self.load = load if load is not None else self.load

    def now(self) -> BatchMoment:
        """This moment, for `mean_since`."""
        at_s = time.monotonic()
        waited_s = at_s - self._summed.at_s
        return BatchMoment(at_s, self._summed.requests_s + waited_s * self._running)

    def mean_since(self, begin: BatchMoment) -> float:
        """Mean number of requests in the engine since that moment, at least the one that asks."""
        end = self.now()
        span_s = end.at_s - begin.at_s
        return max(1.0, (end.requests_s - begin.requests_s) / span_s) if span_s > 0 else 1.0
