"""Which live lane takes a request: the one where it costs the run the least time (costs.py)."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from forgemq_contracts.groups import AdmittedGroup
from forgemq_contracts.lane_plan import LanePlan
from forgemq_contracts.lanes import LANE_LAPSE_MS, KnownLane, LaneLiveness, WeightsId
from forgemq_contracts.weights import ReportedEngine
from forgemq_gateway.core.circuits import Circuits
from forgemq_gateway.core.costs import (
    LaneWork,
    OutputLength,
    Rates,
    cost_s,
    fetch_s,
    fetched_tokens,
    mean_rates,
    take_load,
)
from forgemq_gateway.core.lane_caches import LaneCache

SILENCE_S = 2.5
"""So long without a heartbeat of any lane, each of which sends one a second, it is the log or this
process that stands still, not the lanes: a failover of a broker, or a long pause of the gateway."""


class HeardReport(NamedTuple):
    """The newest heartbeat of a lane, and when it was heard."""

    report: ReportedEngine
    heard_s: float


class Lanes:
    """Lanes of the run by the common rule, how many requests each has in flight, and its errors.

    Times are monotonic seconds of the gateway. `emptied` has, by lane, when its engine last had
    nothing in its cache, in milliseconds of its process's clock.

    Args:
        pool_tokens_per_s: Rate at which an engine fetches what another has computed; None: it
            does not.
        plan: Which lanes are to serve; None: all that do.
    """

    def __init__(
        self, *, pool_tokens_per_s: float | None = None, plan: LanePlan | None = None
    ) -> None:
        self._pool_tokens_per_s = pool_tokens_per_s
        self._plan = plan
        self.circuits = Circuits()
        self._liveness = LaneLiveness()
        self._heard_s = 0.0  # newest heartbeat of any lane
        self._resumed_s = 0.0  # first heartbeat after the newest silence of all lanes
        self.output_length = OutputLength()
        self._work: dict[int, LaneWork] = {}
        self.newest: dict[int, HeardReport] = {}
        self.emptied: dict[int, int] = {}
        self._mean_rates: Rates | None = None  # of all lanes; None until it is asked for

    def report(self, record: ReportedEngine, *, heard_s: float) -> bool:
        """Apply a heartbeat; True if the lane has a new epoch, which lost what the old one had."""
        if not self._liveness.observe(record, at_ms=_ms(heard_s)):
            return False
        self.newest[record.lane] = HeardReport(record, heard_s)
        self.emptied[record.lane] = record.cache_since_ms
        if heard_s - self._heard_s > SILENCE_S:
            self._resumed_s = heard_s
        self._heard_s = max(self._heard_s, heard_s)
        work = self._work.get(record.lane)
        has_changed = work is None or work.epoch != record.epoch
        if work is None or has_changed:
            work = self._work[record.lane] = LaneWork(epoch=record.epoch)
        take_load(work, record.load)
        self._mean_rates = None
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
        work = self._work.get(lane)
        return work is not None and work.epoch == epoch

    def choose(
        self,
        *,
        context_tokens: int,
        cached: Callable[[], Mapping[LaneCache, int]],
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
        ready = self._with_room(self._ready(now_s), context_tokens)
        if len(ready) < 2:
            return ready[0] if ready else None
        known = cached()
        rate = self._pool_tokens_per_s
        pooled = {} if rate is None else _pooled(known)

        def cost(lane: KnownLane) -> tuple[bool, float, int]:
            cached_there = known.get((lane.lane, lane.epoch, lane.weights), 0)
            seconds = 0.0
            if rate is not None:
                fetched = fetched_tokens(pooled.get(lane.weights, 0) - cached_there)
                cached_there += fetched
                seconds = fetch_s(fetched, tokens_per_s=rate)
            seconds += self._cost_s(lane, uncached_tokens=context_tokens - cached_there)
            return lane.lane == failed_on, seconds, lane.lane

        return min(ready, key=cost)

    def _with_room(self, ready: list[KnownLane], context_tokens: int) -> list[KnownLane]:
        """Without the engines whose own limit is below this context, unless it is below all.

        Such an engine refuses the request, and its client gets an error: the context is full.
        """
        roomy = [
            lane
            for lane in ready
            if not 0 < self.newest[lane.lane].report.context_tokens_max <= context_tokens
        ]
        return roomy or ready

    def _cost_s(self, lane: KnownLane, *, uncached_tokens: int) -> float:
        work = self._work[lane.lane]
        return self.circuits.cost_s(lane.lane, lane.epoch) + cost_s(
            work.rates or self._assumed_rates(),
            work,
            uncached_tokens=uncached_tokens,
            output_tokens=self.output_length.tokens,
        )

    def _assumed_rates(self) -> Rates:
        """Those of a lane that was not measured yet."""
        if self._mean_rates is None:
            self._mean_rates = mean_rates(
                [each.rates for each in self._work.values() if each.rates]
            )
        return self._mean_rates

    def takes_requests(self, now_s: float) -> bool:
        """Whether any lane takes a request."""
        return bool(self._ready(now_s))

    def taking(self, now_s: float) -> tuple[int, ...]:
        """The lanes that take requests, by number."""
        return tuple(lane.lane for lane in self._ready(now_s))

    def failing(self, now_s: float) -> tuple[int, ...]:
        """Live lanes that take no request because their engines fail."""
        return tuple(
            lane.lane
            for lane in self._wanted(now_s)
            if not self.circuits.takes_requests(lane.lane, lane.epoch, now_s=now_s)
        )

    def enter(self, lane: int, epoch: int, *, uncached_tokens: int = 0) -> None:
        """Count a request in flight there, of which the lane has this much to read."""
        self._count(lane, epoch, change=1, unread_tokens=uncached_tokens)
        self.circuits.note_sent(lane, epoch)

    def leave(self, lane: int, epoch: int) -> None:
        """Count a request in flight there no more."""
        self._count(lane, epoch, change=-1)
        self.circuits.note_given_up(lane, epoch)

    def in_flight(self) -> Mapping[int, int]:
        """Requests in flight by lane."""
        return {lane: work.in_flight for lane, work in sorted(self._work.items())}

    def _ready(self, now_s: float) -> list[KnownLane]:
        return [
            lane
            for lane in self._wanted(now_s)
            if self.circuits.takes_requests(lane.lane, lane.epoch, now_s=now_s)
        ]

    def _wanted(self, now_s: float) -> list[KnownLane]:
        """Live lanes that are not behind, without those that the plan gives no requests.

        A drained lane also says itself that it does not serve, a moment later.
        """
        plan = self._plan
        return [
            lane
            for lane in self._liveness.takes_requests(_ms(now_s))
            if plan is None or plan.serves(lane.lane)
        ]

    def _count(self, lane: int, epoch: int, *, change: int, unread_tokens: int = 0) -> None:
        work = self._work.get(lane)
        # What an older epoch had in flight is lost, and counts nowhere.
        if work is not None and work.epoch == epoch:
            work.in_flight = max(0, work.in_flight + change)
            work.unread_tokens += unread_tokens


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _pooled(known: Mapping[LaneCache, int]) -> dict[WeightsId | None, int]:
    """Leading tokens that a pool has under each version: what any lane has computed is there."""
    pooled: dict[WeightsId | None, int] = {}
    for (_, _, weights), tokens in known.items():
        pooled[weights] = max(tokens, pooled.get(weights, 0))
    return pooled
