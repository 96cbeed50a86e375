"""Which lanes live, and which one takes a request: the cheapest expected one.

A lane is live while its heartbeats come and it says that it serves. A lane that is behind the
newest weights that every live lane had once loaded takes no requests: it would sample from older
weights than the group's slot allows.
"""

from collections.abc import Callable, Mapping

from msgspec import Struct

from forgemq_contracts.weights import ReportedEngine

# What one request in flight costs the next one, in tokens of prefill: a decode step serves all
# requests of a batch, so it is far below the price of that request itself.
_REQUEST_COST_TOKENS = 512


class Lane(Struct, kw_only=True):
    """The newest heartbeat of a lane, and what is in flight there."""

    number: int
    epoch: int
    is_serving: bool
    weights: tuple[int, int]
    heard_s: float
    in_flight: int = 0


class Lanes:
    """All lanes of the run.

    Args:
        lapse_s: A lane not heard of for so long is dead until it is heard again.
    """

    def __init__(self, *, lapse_s: float) -> None:
        self._lapse_s = lapse_s
        self._lanes: dict[int, Lane] = {}
        self._floor = (0, 0)

    def report(self, record: ReportedEngine, *, heard_s: float) -> bool:
        """Take a heartbeat; True where the lane's epoch has changed.

        An older epoch than the known one is a process that has not noticed its successor.
        """
        weights = (record.lineage, record.version)
        lane = self._lanes.get(record.lane)
        if lane is not None and record.epoch < lane.epoch:
            return False
        has_changed = lane is None or record.epoch != lane.epoch
        if lane is None or has_changed:
            lane = Lane(
                number=record.lane,
                epoch=record.epoch,
                is_serving=record.is_serving,
                weights=weights,
                heard_s=heard_s,
            )
            self._lanes[record.lane] = lane
        lane.is_serving, lane.weights, lane.heard_s = record.is_serving, weights, heard_s
        live = self.live(heard_s)
        if live:
            self._floor = max(self._floor, min(lane.weights for lane in live))
        return has_changed

    def live(self, now_s: float) -> list[Lane]:
        """Lanes that serve and were heard of in time, by number."""
        return [
            lane
            for _, lane in sorted(self._lanes.items())
            if lane.is_serving and now_s - lane.heard_s <= self._lapse_s
        ]

    def holds(self, lane: int, epoch: int, *, now_s: float) -> bool:
        """Whether work given to this lane under this epoch can still come back."""
        known = self._lanes.get(lane)
        return known is not None and known.epoch == epoch and now_s - known.heard_s <= self._lapse_s

    def choose(
        self, *, context_tokens: int, cached: Callable[[int, int], int], now_s: float
    ) -> Lane | None:
        """The live lane where this request costs least, None where there is none.

        Args:
            context_tokens: Length of the context.
            cached: (lane, epoch) -> leading tokens that lane has computed.
            now_s: Monotonic time.
        """
        ready = [lane for lane in self.live(now_s) if lane.weights >= self._floor]
        if not ready:
            return None

        def cost(lane: Lane) -> tuple[int, int]:
            uncached = context_tokens - cached(lane.number, lane.epoch)
            return lane.in_flight * _REQUEST_COST_TOKENS + uncached, lane.number

        return min(ready, key=cost)

    def enter(self, lane: int, epoch: int) -> None:
        """One more request is in flight there."""
        known = self._lanes.get(lane)
        if known is not None and known.epoch == epoch:
            known.in_flight += 1

    def leave(self, lane: int, epoch: int) -> None:
        """One request less is in flight there."""
        known = self._lanes.get(lane)
        if known is not None and known.epoch == epoch and known.in_flight > 0:
            known.in_flight -= 1

    def in_flight(self) -> Mapping[int, int]:
        """Requests in flight by lane."""
        return {number: lane.in_flight for number, lane in sorted(self._lanes.items())}
