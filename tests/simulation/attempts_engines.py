"""The lanes of the attempts world: engines that die, fall silent, load weights and are replaced."""

import heapq
import random
from collections.abc import Callable
from functools import partial

import msgspec

from forgemq_contracts.arrays import pack_floats, pack_ids
from forgemq_contracts.completions import (
    CancelledCompletion,
    FailureKind,
    FinishedCompletion,
    RequestedCompletion,
)
from forgemq_contracts.weights import ReportedEngine


class Calendar:
    """Virtual milliseconds, and every choice of the world, drawn from one seed."""

    def __init__(self, seed: int, *, has_faults: bool) -> None:
        self.random = random.Random(seed)
        self.has_faults = has_faults
        self.now_ms = 0
        self._entries: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, delay_ms: int, happen: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._entries, (self.now_ms + delay_ms, self._count, happen))

    def later(self, low_ms: int, high_ms: int, happen: Callable[[], None]) -> None:
        self.after(self.random.randint(low_ms, high_ms), happen)

    def happens(self, probability: float) -> bool:
        """Whether a fault of this probability happens now."""
        return self.has_faults and self.random.random() < probability

    def run(self, *, until_s: int, check: Callable[[], None]) -> None:
        while self._entries and self._entries[0][0] <= until_s * 1000:
            self.now_ms, _, happen = heapq.heappop(self._entries)
            happen()
            check()


class Engine(msgspec.Struct, eq=False):
    """One process of a lane under one epoch; a zombie works on after its successor started."""

    lane: int
    epoch: int
    is_alive: bool = True
    silent_until_ms: int = 0
    failing_until_ms: int = 0
    loading_until_ms: int = 0
    version: int = 0
    known: set[str] = msgspec.field(default_factory=set)
    cancelled: dict[str, int] = msgspec.field(default_factory=dict)


class Engines:
    """The newest process of each lane, and older ones that still work."""

    def __init__(
        self,
        calendar: Calendar,
        *,
        lanes: int,
        on_report: Callable[[ReportedEngine], None],
        on_finished: Callable[[FinishedCompletion], None],
    ) -> None:
        self.calendar, self.random = calendar, calendar.random
        self.newest = [Engine(lane=number, epoch=1) for number in range(lanes)]
        self.zombies: list[Engine] = []
        self.on_report = on_report
        self.on_finished = on_finished

    def start(self) -> None:
        for engine in self.newest:
            self.calendar.later(0, 4000, partial(self.heartbeat, engine))

    def send(self, record: RequestedCompletion) -> None:
        for engine in (*self.newest, *self.zombies):
            self.calendar.later(5, 300, partial(self.take, engine, record))

    def send_cancel(self, record: CancelledCompletion) -> None:
        for engine in self.newest:
            self.calendar.later(5, 300, partial(self.cancel, engine, record))

    def heartbeat(self, engine: Engine) -> None:
        if not engine.is_alive:
            return
        self.calendar.later(800, 1200, lambda: self.heartbeat(engine))
        if self.calendar.now_ms < engine.silent_until_ms or self.calendar.happens(0.1):
            return
        record = ReportedEngine(
            lane=engine.lane,
            epoch=engine.epoch,
            url="",
            is_serving=self.calendar.now_ms >= engine.loading_until_ms,
            lineage=1,
            version=engine.version,
            running=0,
            queued=0,
            reported_ms=self.calendar.now_ms,
        )
        self.calendar.later(
            0, 4000 if self.calendar.happens(0.1) else 50, lambda: self.on_report(record)
        )

    def fail_one(self) -> None:
        """It dies, is cut off, fails all requests, loads weights, or is replaced and works on."""
        now_ms = self.calendar.now_ms
        engine = self.random.choice(self.newest)
        kind = self.random.choice(("dies", "is silent", "fails", "loads", "is replaced"))
        if kind == "is silent":
            engine.silent_until_ms = now_ms + self.random.randint(2000, 15_000)
            return
        if kind == "fails":
            engine.failing_until_ms = now_ms + self.random.randint(500, 12_000)
            return
        if kind == "loads":
            engine.loading_until_ms = now_ms + self.random.randint(500, 4000)
            return
        if kind == "dies":
            engine.is_alive = False
        self.zombies = [*self.zombies[-3:], engine]
        successor = Engine(lane=engine.lane, epoch=engine.epoch + 1)
        self.newest[engine.lane] = successor
        self.calendar.later(500, 9000, lambda: self.heartbeat(successor))

    def take(self, engine: Engine, record: RequestedCompletion) -> None:
        if not engine.is_alive or (record.lane, record.epoch) != (engine.lane, engine.epoch):
            return
        lost = record.is_delta and record.parent_id not in engine.known
        failure: FailureKind | None = "context_missing" if lost else None
        if self.calendar.now_ms < engine.failing_until_ms:
            failure = "engine"
        elif self.calendar.happens(0.15):
            failure = self.calendar.random.choice(
                ("engine", "engine", "engine", "context_overflow")
            )
        took_ms = self.calendar.random.choice(
            (100, 800, 3000, 9000 if self.calendar.has_faults else 3000)
        )
        self.calendar.after(0 if failure else took_ms, lambda: self.finish(engine, record, failure))

    def cancel(self, engine: Engine, record: CancelledCompletion) -> None:
        engine.cancelled[record.request_id] = record.attempt

    def finish(
        self, engine: Engine, asked: RequestedCompletion, failure: FailureKind | None
    ) -> None:
        if not engine.is_alive:
            return
        if engine.cancelled.get(asked.request_id, -1) >= asked.attempt:
            failure = "cancelled"
        elif failure is None and self.calendar.now_ms >= asked.deadline_ms:
            failure = "deadline"
        if failure is None:
            engine.known.add(asked.request_id)
        own = asked.context if asked.is_delta else asked.context[asked.shared_prefix_tokens * 4 :]
        record = FinishedCompletion(
            request_id=asked.request_id,
            attempt=asked.attempt,
            episode_id=asked.episode_id,
            group_id=asked.group_id,
            lane=engine.lane,
            epoch=engine.epoch,
            finish_reason="stop" if failure is None else "error",
            turn=asked.turn,
            parent_id=asked.parent_id,
            shared_prefix_tokens=asked.shared_prefix_tokens,
            context=own,
            output=pack_ids([9, 9] if failure is None else []),
            logprobs=pack_floats([-0.5, -0.5] if failure is None else []),
            failure=failure,
        )
        for _ in range(2 if self.calendar.happens(0.1) else 1):
            self.on_finished(record)
