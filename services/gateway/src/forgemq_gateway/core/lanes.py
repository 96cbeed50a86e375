"""Which live lane takes a request: the one where it is expected to cost least."""

from collections.abc import Callable, Mapping

from forgemq_contracts.groups import AdmittedGroup
from forgemq_contracts.lanes import KnownLane, LaneLiveness
from forgemq_contracts.weights import ReportedEngine

_REQUEST_COST_TOKENS = 512
"""What one request in flight costs the next one, in tokens of prefill: a decode step serves all
requests of a batch, so it is far below the price of that request itself."""


class Lanes:
    """Lanes of the run by the common rule, and how many requests each has in flight.

    Times are monotonic seconds of the gateway.
    """

    def __init__(self) -> None:
        self._liveness = LaneLiveness()
        self._in_flight: dict[int, tuple[int, int]] = {}  # lane -> epoch, requests

    def report(self, record: ReportedEngine, *, heard_s: float) -> bool:
        """Apply a heartbeat; True if the lane has a new epoch, which lost what the old one had."""
        if not self._liveness.observe(record, at_ms=_ms(heard_s)):
            return False
        known = self._in_flight.get(record.lane)
        has_changed = known is None or known[0] != record.epoch
        if has_changed:
            self._in_flight[record.lane] = (record.epoch, 0)
        return has_changed

    def admit(self, record: AdmittedGroup) -> None:
        """Give lanes behind the weights that the scheduler admitted this group under no requests.

        The staleness bound rests on this and not on what the gateway itself has heard: a lane
        whose silence only the scheduler noticed looks as good as any from here.
        """
        self._liveness.raise_floor((record.lineage_at_admission, record.version_at_admission))

    def holds(self, lane: int, epoch: int, *, now_s: float) -> bool:
        """Whether work given to this lane under this epoch can still come back."""
        return self._liveness.holds(lane, epoch, at_ms=_ms(now_s))

    def choose(
        self, *, context_tokens: int, cached: Callable[[int, int], int], now_s: float
    ) -> KnownLane | None:
        """The lane where this request costs least; None if no lane takes requests.

        Args:
            context_tokens: Length of the context.
            cached: (lane, epoch) -> leading tokens that lane has computed.
            now_s: Monotonic time.
        """

        def cost(lane: KnownLane) -> tuple[int, int]:
            uncached = context_tokens - cached(lane.lane, lane.epoch)
            in_flight = self._in_flight[lane.lane][1]
            return in_flight * _REQUEST_COST_TOKENS + uncached, lane.lane

        return min(self._liveness.takes_requests(_ms(now_s)), key=cost, default=None)

    def enter(self, lane: int, epoch: int) -> None:
        """Count a request in flight there."""
        self._count(lane, epoch, change=1)

    def leave(self, lane: int, epoch: int) -> None:
        """Count a request in flight there no more."""
        self._count(lane, epoch, change=-1)

    def in_flight(self) -> Mapping[int, int]:
        """Requests in flight by lane."""
        return {lane: requests for lane, (_, requests) in sorted(self._in_flight.items())}

    def _count(self, lane: int, epoch: int, *, change: int) -> None:
        known_epoch, requests = self._in_flight.get(lane, (epoch - 1, 0))
        if known_epoch == epoch:  # what an older epoch had in flight is lost, and counts nowhere
            self._in_flight[lane] = (epoch, max(0, requests + change))


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
