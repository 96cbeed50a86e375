"""Lanes that are slow, fall silent, die, come and go, and observers that read of it late.

Only the lanes know their real state. Scheduler and gateways each read every partition in its order
and different partitions in any order, now and then seconds late. A gateway chooses lanes with the
product's rule.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable

import msgspec

from forgemq_contracts.groups import AdmittedGroup
from forgemq_contracts.lane_plan import LanePlan, RequestedLane
from forgemq_contracts.lanes import KnownLane
from forgemq_contracts.weights import LoadedWeights, ReportedEngine
from forgemq_gateway.core.lanes import Lanes

TAIL_REPORTS = 5  # heartbeats of each lane that a gateway's start reads


class Calendar:
    """What happens when; time is virtual milliseconds."""

    def __init__(self) -> None:
        self.now_ms = 0
        self._entries: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, delay_ms: int, happen: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._entries, (self.now_ms + delay_ms, self._count, happen))

    def run(self, *, until_ms: int, is_over: Callable[[], bool]) -> None:
        while self._entries and self._entries[0][0] <= until_ms and not is_over():
            self.now_ms, _, happen = heapq.heappop(self._entries)
            happen()


class Observer:
    """One reader of the log: it reads each partition in order, and late."""

    def __init__(self, calendar: Calendar, chance: random.Random, *, is_late: bool) -> None:
        self._calendar = calendar
        self._chance = chance
        self._is_late = is_late
        self._busy_until_ms: dict[str, int] = {}
        self._stalled_until_ms = 0

    def hear(self, partition: str, happen: Callable[[], None]) -> None:
        now_ms = self._calendar.now_ms
        if self._is_late and self._chance.random() < 0.005:  # reads nothing for a while
            self._stalled_until_ms = now_ms + self._chance.randrange(1000, 12_000)
        delay_ms = self._chance.randrange(1500 if self._chance.random() < 0.05 else 200)
        at_ms = max(
            now_ms + (delay_ms if self._is_late else 0),
            self._stalled_until_ms,
            self._busy_until_ms.get(partition, 0),
        )
        self._busy_until_ms[partition] = at_ms
        self._calendar.after(at_ms - now_ms, happen)


class Lane(msgspec.Struct):
    """A lane as it really is; `silent_until_ms`: it serves, but reads and writes no record."""

    number: int
    epoch: int = 0
    is_alive: bool = True
    weights: tuple[int, int] = (0, 0)
    silent_until_ms: int = 0
    plan: LanePlan | None = None  # as its process has read it
    hearing: Observer | None = None

    @property
    def is_wanted(self) -> bool:
        return self.plan is None or self.plan.serves(self.number)


class Gateway:
    """The product's choice of lanes, from what this gateway has heard."""

    def __init__(
        self, calendar: Calendar, observer: Observer, *, plan: LanePlan | None = None
    ) -> None:
        self._calendar = calendar
        self._observer = observer
        self._plan = plan
        self.lanes = Lanes(plan=plan)
        self._reports: dict[int, deque[ReportedEngine]] = {}
        self._admitted: list[AdmittedGroup] = []

    def hear(self, report: ReportedEngine) -> None:
        self._observer.hear(f"report {report.lane}", lambda: self._report(report))

    def admit(self, record: AdmittedGroup, *, then: Callable[[], None]) -> None:
        """Hear of an admitted group, then play it."""

        def happen() -> None:
            self._admitted.append(record)
            self.lanes.admit(record)
            then()

        self._observer.hear("admitted", happen)

    def hear_change(self, change: RequestedLane) -> None:
        """Hear that the plan of lanes changes; a start reads all changes again."""
        plan = self._plan
        assert plan is not None
        self._observer.hear("lanes", lambda: [plan.apply(change)])

    def restart(self) -> None:
        """Know only what a start reads from the log."""
        self.lanes = Lanes(plan=self._plan)
        for reports in self._reports.values():
            for report in reports:
                self.lanes.report(report, heard_s=self._calendar.now_ms / 1000)
        for record in self._admitted[-50:]:
            self.lanes.admit(record)

    def choose(self) -> KnownLane | None:
        return self.lanes.choose(
            context_tokens=100, cached=dict, now_s=self._calendar.now_ms / 1000
        )

    def _report(self, report: ReportedEngine) -> None:
        self._reports.setdefault(report.lane, deque(maxlen=TAIL_REPORTS)).append(report)
        self.lanes.report(report, heard_s=self._calendar.now_ms / 1000)


class Engines:
    """The lanes of a world; `tell` is called with each record they write."""

    def __init__(
        self,
        calendar: Calendar,
        chance: random.Random,
        *,
        count: int,
        tell: Callable[[ReportedEngine | LoadedWeights], None],
    ) -> None:
        self.lanes = [Lane(number=number) for number in range(count)]
        self.published = (1, 0)
        self._calendar = calendar
        self._chance = chance
        self._tell = tell

    def start(self) -> None:
        for lane in self.lanes:
            self._calendar.after(self._chance.randrange(3000), lambda lane=lane: self._beat(lane))
            self._calendar.after(self._chance.randrange(5000), lambda lane=lane: self._load(lane))

    def die(self, lane: Lane) -> None:
        """End the lane's process; it starts again on the base model, under a new epoch."""

        def start() -> None:
            lane.is_alive, lane.epoch, lane.weights = True, lane.epoch + 1, (0, 0)

        if lane.is_alive:
            lane.is_alive = False
            self._calendar.after(self._chance.randrange(1000, 30_000), start)

    def follow_plan(self, *, lanes: int, observer: Callable[[], Observer]) -> None:
        """Let every process read the plan of lanes, which begins with so many."""
        for lane in self.lanes:
            lane.plan = LanePlan(lanes=lanes, lanes_max=len(self.lanes))
            lane.hearing = observer()

    def change(self, change: RequestedLane) -> None:
        """Every lane's process reads a change; that of a lane that is removed ends.

        Then it is started again, as a supervisor would, and waits until its lane is added.
        """
        for lane in self.lanes:
            assert lane.hearing is not None
            lane.hearing.hear("lanes", lambda lane=lane: self._apply(lane, change))

    def _apply(self, lane: Lane, change: RequestedLane) -> None:
        assert lane.plan is not None
        if not lane.plan.apply(change) and (change.change, change.lane) == ("remove", lane.number):
            self.die(lane)

    def fall_silent(self, lane: Lane) -> None:
        """Cut the lane off from the log: its engine goes on with what it has."""
        lane.silent_until_ms = self._calendar.now_ms + self._chance.randrange(2000, 20_000)

    def sample(
        self, known: KnownLane, *, then: Callable[[int], None], lost: Callable[[], None]
    ) -> None:
        """Send a request to a lane; `then` gets the oldest version that sampled its tokens."""
        lane = self.lanes[known.lane]
        slow = 40_000 if self._chance.random() < 0.05 else 4000

        def begin() -> None:
            if lane.epoch != known.epoch or not lane.is_alive:
                self._calendar.after(1000, lost)
                return
            version = lane.weights[1]
            self._calendar.after(
                self._chance.randrange(100, slow),
                lambda: then(version) if lane.epoch == known.epoch and lane.is_alive else lost(),
            )

        self._calendar.after(self._chance.randrange(200), begin)

    def _is_connected(self, lane: Lane) -> bool:
        return lane.is_alive and self._calendar.now_ms >= lane.silent_until_ms

    def _beat(self, lane: Lane) -> None:
        if self._is_connected(lane):
            self._tell(
                ReportedEngine(
                    lane=lane.number,
                    epoch=lane.epoch,
                    url="",
                    is_serving=lane.is_wanted,
                    lineage=lane.weights[0],
                    version=lane.weights[1],
                    running=0,
                    queued=0,
                    reported_ms=0,
                )
            )
        self._calendar.after(1000, lambda: self._beat(lane))

    def _load(self, lane: Lane) -> None:
        if self._is_connected(lane) and lane.weights < self.published:
            lane.weights = self.published
            self._tell(
                LoadedWeights(
                    lane=lane.number,
                    epoch=lane.epoch,
                    lineage=lane.weights[0],
                    version=lane.weights[1],
                    path="fast",
                    duration_s=0.0,
                )
            )
        self._calendar.after(self._chance.randrange(100, 4000), lambda: self._load(lane))
