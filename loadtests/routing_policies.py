"""Who gets the next turn: the gateway's own choice, and those of others.

Each sees what a router can see: which turns it gave to which engine, which have ended there, and
once a second what the engines report.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Protocol

from routing_engine import SimulatedEngine, Work

from forgemq_contracts.lanes import LANE_LAPSE_MS
from forgemq_contracts.weights import ReportedEngine
from forgemq_gateway.core.lane_caches import LaneCache
from forgemq_gateway.core.lanes import Lanes
from forgemq_inference.core.engine_load import EngineMeter

LINEAGE = 1


class Policy(Protocol):
    """One router."""

    def choose(self, work: Work, *, now_s: float) -> int:
        """The engine that gets this turn."""
        ...

    def note_ended(self, work: Work, engine: int) -> None:
        """Note that a turn has ended on this engine."""
        ...

    def note_failed(self, work: Work, engine: int, *, now_s: float, is_lost: bool) -> None:
        """Note that a turn failed on this engine; it is given out again.

        Args:
            work: The turn.
            engine: It answered with an error, or the connection to it broke.
            now_s: When.
            is_lost: It died, and what it had is lost.
        """
        ...

    def noticed_s(self, engine: int) -> float:
        """When an engine that is dead is known to be; in the past if its connections say so."""
        ...

    def note_report(self, engines: Sequence[SimulatedEngine], *, now_s: float) -> None:
        """Read what the engines report."""
        ...


class RoundRobin:
    """One engine after the other."""

    def __init__(self, engines: int) -> None:
        self._engines = engines
        self._number = -1

    def choose(self, work: Work, *, now_s: float) -> int:
        """The next engine."""
        self._number += 1
        return self._number % self._engines

    def note_ended(self, work: Work, engine: int) -> None:
        """Nothing."""

    def note_failed(self, work: Work, engine: int, *, now_s: float, is_lost: bool) -> None:
        """Nothing."""

    def noticed_s(self, engine: int) -> float:
        """At once: connections break, or are refused."""
        return 0.0

    def note_report(self, engines: Sequence[SimulatedEngine], *, now_s: float) -> None:
        """Nothing."""


class LeastInFlight(RoundRobin):
    """The engine with the fewest turns."""

    def __init__(self, engines: int) -> None:
        super().__init__(engines)
        self.in_flight = [0] * engines

    def choose(self, work: Work, *, now_s: float) -> int:
        """The engine with the fewest turns; the first of several."""
        return self._given(min(range(self._engines), key=lambda engine: self.in_flight[engine]))

    def note_ended(self, work: Work, engine: int) -> None:
        """Count it no more."""
        self.in_flight[engine] -= 1

    def note_failed(self, work: Work, engine: int, *, now_s: float, is_lost: bool) -> None:
        """Count it no more."""
        self.in_flight[engine] -= 1

    def _given(self, engine: int) -> int:
        self.in_flight[engine] += 1
        return engine


class Sticky(LeastInFlight):
    """An episode stays on the engine that had the fewest episodes when it began.

    As prime-rl and SkyRL do since hashing overloaded single engines (prime-rl#3255).
    """

    def __init__(self, engines: int) -> None:
        super().__init__(engines)
        self._home: dict[Hashable, int] = {}
        self._episodes: Counter[int] = Counter()

    def choose(self, work: Work, *, now_s: float) -> int:
        """The episode's engine."""
        home = self._home.get(work.episode)
        return self._given(self._settle(work.episode) if home is None else home)

    def note_failed(self, work: Work, engine: int, *, now_s: float, is_lost: bool) -> None:
        """Move the episode to another engine."""
        super().note_failed(work, engine, now_s=now_s, is_lost=is_lost)
        self.forget(work.episode)
        self._settle(work.episode, without=engine)

    def forget(self, episode: Hashable) -> None:
        """An episode is over."""
        self._episodes[self._home.pop(episode)] -= 1

    def _settle(self, episode: Hashable, *, without: int = -1) -> int:
        engines = [engine for engine in range(self._engines) if engine != without]
        home = min(engines, key=lambda engine: self._episodes[engine])
        self._home[episode] = home
        self._episodes[home] += 1
        return home


class CacheAware(LeastInFlight):
    """SGLang's router: the longest known prefix, or the shortest queue if they are too unequal.

    Source: sgl-model-gateway, src/policies/cache_aware.rs, with its default thresholds. It does
    not know that an update of the weights empties a cache.
    """

    _MATCH_MIN = 0.3
    _UNEQUAL_BY = 64
    _UNEQUAL_TIMES = 1.5

    def __init__(self, engines: int) -> None:
        super().__init__(engines)
        self._known: list[dict[Hashable, int]] = [{} for _ in range(engines)]

    def choose(self, work: Work, *, now_s: float) -> int:
        """The engine with the longest match, if that is a third of the context."""
        most, fewest = max(self.in_flight), min(self.in_flight)
        if most - fewest > self._UNEQUAL_BY and most > self._UNEQUAL_TIMES * fewest:
            engine = self.in_flight.index(fewest)
        else:
            matches = [self._match(work, known) for known in self._known]
            engine = max(range(self._engines), key=lambda each: matches[each])
            if matches[engine] < self._MATCH_MIN * work.context_tokens:
                sizes = [sum(known.values()) for known in self._known]
                engine = sizes.index(min(sizes))
        self._known[engine][work.group] = work.prompt_tokens
        self._known[engine][work.episode] = work.context_tokens
        return self._given(engine)

    @staticmethod
    def _match(work: Work, known: dict[Hashable, int]) -> int:
        return max(known.get(work.episode, 0), known.get(work.group, 0))


class Dynamo(LeastInFlight):
    """NVIDIA Dynamo's router: tokens to read, own and waiting, plus those that are being decoded.

    Source: docs.nvidia.com/dynamo, routing concepts, with weight 1. It hears from each engine what
    it has cached, and which version drops all of it, but not what a full cache drops.
    """

    def __init__(self, engines: int) -> None:
        super().__init__(engines)
        self._engines_seen: Sequence[SimulatedEngine] = ()
        self._cached: list[dict[Hashable, tuple[int, tuple[int, int]]]] = [
            {} for _ in range(engines)
        ]

    def choose(self, work: Work, *, now_s: float) -> int:
        """The engine with the fewest tokens."""
        return self._given(min(range(self._engines), key=lambda engine: self._cost(work, engine)))

    def note_ended(self, work: Work, engine: int) -> None:
        """Note what the engine has cached."""
        super().note_ended(work, engine)
        seen = self._engines_seen[engine]
        filled = seen.starts, seen.version
        self._cached[engine][work.group] = work.prompt_tokens, filled
        tokens = work.context_tokens + work.output_tokens
        self._cached[engine][work.episode] = tokens, filled

    def note_report(self, engines: Sequence[SimulatedEngine], *, now_s: float) -> None:
        """Look at the engines."""
        self._engines_seen = engines

    def _cost(self, work: Work, engine: int) -> int:
        seen = self._engines_seen[engine]
        found = [
            tokens
            for key in (work.episode, work.group)
            for tokens, filled in (self._cached[engine].get(key, (0, (0, 0))),)
            if filled == (seen.starts, seen.version)
        ]
        counters = seen.counters()
        known = counters.num_waiting_uncached_tokens + counters.num_used_tokens
        return work.context_tokens - max(found, default=0) + known


class Gateway:
    """The gateway's own core, with the heartbeats that inference processes write."""

    def __init__(self, engines: int, *, pool_tokens_per_s: float | None = None) -> None:
        self._lanes = Lanes(pool_tokens_per_s=pool_tokens_per_s)
        self._meters = [EngineMeter() for _ in range(engines)]
        self._epochs = [1] * engines
        self._versions = [0] * engines
        self._heard_s = [0.0] * engines
        self._cached: dict[Hashable, dict[LaneCache, int]] = {}
        self._failed_on: dict[Hashable, int] = {}

    def choose(self, work: Work, *, now_s: float) -> int:
        """The lane where the turn costs the run the least time."""
        prompt, own = self._cached.get(work.group, {}), self._cached.get(work.episode, {})
        cached = prompt | own
        lane = self._lanes.choose(
            context_tokens=work.context_tokens,
            cached=lambda: cached,
            now_s=now_s,
            failed_on=self._failed_on.get(work.episode, -1),
        )
        assert lane is not None, "all lanes are live"
        known = cached.get((lane.lane, lane.epoch, lane.weights), 0)
        uncached = work.context_tokens - min(known, work.context_tokens - 1)
        self._lanes.enter(lane.lane, lane.epoch, uncached_tokens=uncached)
        return lane.lane

    def note_ended(self, work: Work, engine: int) -> None:
        """Note what the lane has cached, and how long the output is."""
        epoch = self._epochs[engine]
        where: LaneCache = (engine, epoch, (LINEAGE, self._versions[engine]))
        self._cached.setdefault(work.group, {})[where] = work.prompt_tokens
        self._cached.setdefault(work.episode, {})[where] = work.context_tokens + work.output_tokens
        self._lanes.leave(engine, epoch)
        self._lanes.circuits.note_success(engine, epoch)
        self._failed_on.pop(work.episode, None)
        self._lanes.output_length.note(work.output_tokens)

    def note_failed(self, work: Work, engine: int, *, now_s: float, is_lost: bool) -> None:
        """Count the error of the lane; the turn goes to another one if there is one."""
        epoch = self._epochs[engine]
        self._lanes.leave(engine, epoch)
        if not is_lost:
            self._lanes.circuits.note_error(engine, epoch, now_s=now_s)
            self._failed_on[work.episode] = engine

    def noticed_s(self, engine: int) -> float:
        """When the lane has been silent for too long: its inference process died with it."""
        return self._heard_s[engine] + LANE_LAPSE_MS / 1000

    def note_report(self, engines: Sequence[SimulatedEngine], *, now_s: float) -> None:
        """Take a heartbeat of every lane that is up."""
        for lane, engine in enumerate(engines):
            if engine.down_since_s is not None:
                continue
            if engine.starts != self._epochs[lane]:
                self._meters[lane] = EngineMeter()
            self._epochs[lane], self._versions[lane] = engine.starts, engine.version
            self._heard_s[lane] = now_s
            report = ReportedEngine(
                lane=lane,
                epoch=engine.starts,
                url="",
                is_serving=True,
                lineage=LINEAGE,
                version=engine.version,
                running=len(engine.running),
                queued=len(engine.waiting),
                reported_ms=round(now_s * 1000),
                load=self._meters[lane].observe(engine.counters()),
            )
            self._lanes.report(report, heard_s=now_s)


POLICIES = {
    "round_robin": RoundRobin,
    "least_in_flight": LeastInFlight,
    "sticky": Sticky,
    "cache_aware": CacheAware,
    "dynamo": Dynamo,
    "gateway": Gateway,
}
