"""Which live lane takes a request: the one where it is expected to cost least."""

from collections.abc import Callable, Mapping

from forgemq_contracts.groups import AdmittedGroup
from forgemq_contracts.lanes import LANE_LAPSE_MS, KnownLane, LaneLiveness
from forgemq_contracts.weights import ReportedEngine
from forgemq_gateway.core.circuits import Circuits
from forgemq_gateway.core.completion_tokens import LaneEpoch

_REQUEST_COST_TOKENS = 512
"""What one request in flight costs the next one, in tokens of prefill: a decode step serves all
requests of a batch, so it is far below the price of that request itself."""

SILENCE_S = 2.5
"""So long without a heartbeat of any lane, each of which sends one a second, it is the log or this
process that stands still, not the lanes: a failover of a broker, or a long pause of the gateway."""


class Lanes:
    """Lanes of the run by the common rule, how many requests each has in flight, and its errors.

    Times are monotonic seconds of the gateway.
    """

    def __init__(self) -> None:
        self.circuits = Circuits()
        self._liveness = LaneLiveness()
        self._heard_s = 0.0  # newest heartbeat of any lane
        self._resumed_s = 0.0  # first heartbeat after the newest silence of all lanes
        self._in_flight: dict[int, tuple[int, int]] = {}  # lane -> epoch, requests

    def report(self, record: ReportedEngine, *, heard_s: float) -> bool:
        """Apply a heartbeat; True if the lane has a new epoch, which lost what the old one had."""
        if not self._liveness.observe(record, at_ms=_ms(heard_s)):
            return False
        if heard_s - self._heard_s > SILENCE_S:
            self._resumed_s = heard_s
        self._heard_s = max(self._heard_s, heard_s)
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
        """Whether work given to this lane under this epoch can still come back.

        While no lane at all is heard, the silence of one means nothing. Afterwards each lane has as
        long to be heard as it would have had, or the first one to be heard would get all work.
        """
        if self._liveness.holds(lane, epoch, at_ms=_ms(now_s)):
            return True
        if not self.is_epoch(lane, epoch):
            return False
        is_silence = now_s - self._heard_s > SILENCE_S
        return is_silence or _ms(now_s - self._resumed_s) <= LANE_LAPSE_MS

    def is_epoch(self, lane: int, epoch: int) -> bool:
        """Whether this is the newest epoch heard of on the lane."""
        return self._in_flight.get(lane, (epoch - 1, 0))[0] == epoch

    def choose(
        self,
        *,
        context_tokens: int,
        cached: Callable[[], Mapping[LaneEpoch, int]],
        now_s: float,
        failed_on: int = -1,
    ) -> KnownLane | None:
        """The lane where this request costs least; None if no lane takes requests.

        Args:
            context_tokens: Length of the context.
            cached: Leading tokens that each lane has computed; asked once, if there is a choice.
            now_s: Monotonic time.
            failed_on: The lane whose engine failed this request; taken only if there is no other.
        """
        ready = self._ready(now_s)
        if len(ready) < 2:
            return ready[0] if ready else None
        known = cached()

        def cost(lane: KnownLane) -> tuple[bool, int, int]:
            uncached = context_tokens - known.get((lane.lane, lane.epoch), 0)
            tokens = self._in_flight[lane.lane][1] * _REQUEST_COST_TOKENS + uncached
            tokens += self.circuits.cost_tokens(lane.lane, lane.epoch)
            return lane.lane == failed_on, tokens, lane.lane

        return min(ready, key=cost)

    def takes_requests(self, now_s: float) -> bool:
        """Whether any lane takes a request."""
        return bool(self._ready(now_s))

    def failing(self, now_s: float) -> tuple[int, ...]:
        """Live lanes that take no request because their engines fail."""
        return tuple(
            lane.lane
            for lane in self._liveness.takes_requests(_ms(now_s))
            if not self.circuits.takes_requests(lane.lane, lane.epoch, now_s=now_s)
        )

    def enter(self, lane: int, epoch: int) -> None:
        """Count a request in flight there."""
        self._count(lane, epoch, change=1)
        self.circuits.note_sent(lane, epoch)

    def leave(self, lane: int, epoch: int) -> None:
        """Count a request in flight there no more."""
        self._count(lane, epoch, change=-1)
        self.circuits.note_given_up(lane, epoch)

    def in_flight(self) -> Mapping[int, int]:
        """Requests in flight by lane."""
        return {lane: requests for lane, (_, requests) in sorted(self._in_flight.items())}

    def _ready(self, now_s: float) -> list[KnownLane]:
        return [
            lane
            for lane in self._liveness.takes_requests(_ms(now_s))
            if self.circuits.takes_requests(lane.lane, lane.epoch, now_s=now_s)
        ]

    def _count(self, lane: int, epoch: int, *, change: int) -> None:
        known_epoch, requests = self._in_flight.get(lane, (epoch - 1, 0))
        if known_epoch == epoch:  # what an older epoch had in flight is lost, and counts nowhere
            self._in_flight[lane] = (epoch, max(0, requests + change))


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
