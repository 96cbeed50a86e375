"""Which way to choose an engine for each turn finishes more turns, and with a shorter wait?

Simulated engines (`routing_engine.py`) get the turns of 384 episodes (`routing_trace.py`) by each
policy (`routing_policies.py`); the gateway's is its own code, with the heartbeats of its lanes.

`long_tailed`: eight engines, new weights every 240 s, on one engine after the other.
`frequent_updates`: every 60 s. `unequal_lanes`: of the eight, two are half as fast and two a
quarter, and one stands still for 30 s. `with_pool`: as the first, with a pool of 60,000 tokens a
second for each turn that fetches. `failing_lane`: one engine answers every turn with an error, at
once, from 60 s to 240 s. `stalled_lane`: one stands still from 60 s to 120 s. `late_weights`: as
`frequent_updates`, and two engines load each version 30 s after the others. `restarted_lane`: one
engine dies at 60, 180 and 300 s with all that it has, and is up again 30 s later. `make load
NAME=routing`; `--traces FILE` plays those of a real run
(`python loadtests/routing_trace.py RUN FILE`), and `--speed` makes all engines slower or faster: a
run with short contexts is over on fast ones before weights are updated or an engine stands still.
"""

import heapq
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
from measurement import Measurement, parser_of
from msgspec import Struct
from routing_engine import EngineSpeed, SharedPool, SimulatedEngine, Work
from routing_policies import POLICIES, Gateway, Policy, Sticky
from routing_trace import EpisodeTrace, synthetic

from forgemq_gateway.core.attempts import RETRY_PAUSE_S

_ENGINES = 8
_EPISODES_AT_ONCE = 320
_GROUPS = 48
_GROUP_SIZE = 8
_SEEDS = (0, 1)
_ORDERS = range(4)
"""In which the groups of a run's trace begin: another one changes a ratio of turns by 3 %."""
_HEARTBEAT_S = 1.0
_ERROR_S = 0.02
"""From a request to its error: the engine's HTTP server answers, its scheduler does not."""
_LOAD_S = 2.0
"""Between the loads of two engines: their pauses do not fall together."""


class Fleet(Struct, frozen=True, kw_only=True):
    """The engines of one case.

    Attributes:
        speeds: Relative ones.
        update_every_s: Between two versions of the weights.
        stalls: (engine, from, until) in seconds.
        failures: (engine, from, until) in seconds: what it is given then fails at once.
        restarts: (engine, from, until) in seconds: it is down, and then has no cache and a new
            epoch.
        late_s: By engine: so long after the others it loads new weights.
        pool_tokens_per_s: Rate of a pool that all engines share; None: there is no pool.
    """

    speeds: tuple[float, ...] = (1.0,) * _ENGINES
    update_every_s: float = 240.0
    stalls: tuple[tuple[int, float, float], ...] = ()
    failures: tuple[tuple[int, float, float], ...] = ()
    restarts: tuple[tuple[int, float, float], ...] = ()
    late_s: tuple[float, ...] = (0.0,) * _ENGINES
    pool_tokens_per_s: float | None = None


CASES = {
    "long_tailed": Fleet(),
    "frequent_updates": Fleet(update_every_s=60.0),
    "unequal_lanes": Fleet(
        speeds=(1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25), stalls=((0, 60.0, 90.0),)
    ),
    "with_pool": Fleet(pool_tokens_per_s=60_000.0),
    "failing_lane": Fleet(failures=((0, 60.0, 240.0),)),
    "stalled_lane": Fleet(stalls=((0, 60.0, 120.0),)),
    "late_weights": Fleet(update_every_s=60.0, late_s=(30.0, 30.0) + (0.0,) * (_ENGINES - 2)),
    "restarted_lane": Fleet(restarts=((0, 60.0, 90.0), (0, 180.0, 210.0), (0, 300.0, 330.0))),
}


class Outcome(Struct, frozen=True, kw_only=True):
    """One simulation: turns a second until the last has ended, their waits, and cache hits.

    `failed`: attempts that failed, for each turn.
    """

    turns_per_s: float
    p99_s: float
    hit_rate: float
    failed: float


class Simulation:
    """Plays the traces on engines by one policy; time is simulated."""

    def __init__(self, fleet: Fleet, policy: Policy, traces: Sequence[EpisodeTrace]) -> None:
        self._fleet = fleet
        self._policy = policy
        rate = fleet.pool_tokens_per_s
        pool = None if rate is None else SharedPool(rate)
        self._engines = [
            SimulatedEngine(EngineSpeed().times(speed), pool) for speed in fleet.speeds
        ]
        self._todo = iter(enumerate(traces))
        self._open = 0
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._waits_s: list[float] = []
        self._cached = self._asked = self._failed = 0

    def run(self) -> Outcome:
        """Play until every episode has ended."""
        self._heartbeat()
        self._at(self._fleet.update_every_s, partial(self._update, 1))
        for engine, begin_s, end_s in self._fleet.stalls:
            self._at(begin_s, partial(self._stall, engine, end_s))
        for engine, begin_s, end_s in self._fleet.restarts:
            self._at(begin_s, partial(self._die, engine))
            self._at(end_s, partial(self._start, engine))
        for _ in range(_EPISODES_AT_ONCE):
            self._begin()
        while self._open:
            self._now_s, _, event = heapq.heappop(self._events)
            event()
        waits_s = sorted(self._waits_s)
        return Outcome(
            turns_per_s=len(waits_s) / self._now_s,
            p99_s=waits_s[len(waits_s) * 99 // 100],
            hit_rate=self._cached / self._asked,
            failed=self._failed / len(waits_s),
        )

    @property
    def turns(self) -> int:
        """Number of turns that have ended."""
        return len(self._waits_s)

    def _at(self, time_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), event))

    def _heartbeat(self) -> None:
        self._policy.note_report(self._engines, now_s=self._now_s)
        self._at(self._now_s + _HEARTBEAT_S, self._heartbeat)

    def _update(self, version: int) -> None:
        for number in range(len(self._engines)):
            at_s = self._now_s + _LOAD_S * number + self._fleet.late_s[number]
            self._at(at_s, partial(self._load, number, version))
        self._at(self._now_s + self._fleet.update_every_s, partial(self._update, version + 1))

    def _load(self, number: int, version: int) -> None:
        self._engines[number].load(version)
        self._policy.note_report(self._engines, now_s=self._now_s)  # Lanes report every change.

    def _stall(self, engine: int, end_s: float) -> None:
        self._engines[engine].stalled_until_s = end_s

    def _die(self, number: int) -> None:
        for work in self._engines[number].die(now_s=self._now_s):
            self._lose(work, number)

    def _start(self, number: int) -> None:
        self._engines[number].start()
        self._policy.note_report(self._engines, now_s=self._now_s)

    def _begin(self) -> None:
        number, trace = next(self._todo, (0, None))
        if trace is not None:
            self._open += 1
            self._play(number, trace, _turns(trace))

    def _play(self, number: int, trace: EpisodeTrace, turns: "Iterator[Turn]") -> None:
        turn = next(turns, None)
        if turn is None:
            self._open -= 1
            if isinstance(self._policy, Sticky):
                self._policy.forget(number)
            self._begin()
            return
        work = Work(
            episode=number,
            group=trace.group,
            prompt_tokens=trace.prompt_tokens,
            context_tokens=turn.context_tokens,
            output_tokens=turn.output_tokens,
            asked_s=self._now_s,
        )
        go_on = partial(self._play, number, trace, turns)
        work.when_ended = lambda: self._at(self._now_s + turn.tool_s, go_on)
        self._give(work)

    def _give(self, work: Work) -> None:
        """Give a turn to an engine; if it fails there, again after a pause."""
        engine = self._policy.choose(work, now_s=self._now_s)
        if any(
            each == engine and begin_s <= self._now_s < end_s
            for each, begin_s, end_s in self._fleet.failures
        ):
            self._at(self._now_s + _ERROR_S, partial(self._fail, work, engine))
            return
        if self._engines[engine].down_since_s is not None:
            self._lose(work, engine)
            return
        self._engines[engine].take(work)
        self._cached += work.cached_tokens
        self._asked += work.context_tokens
        if work.ready_s > self._now_s:
            self._at(work.ready_s, partial(self._work_on, engine))
        self._work_on(engine)

    def _lose(self, work: Work, engine: int) -> None:
        """Give a turn of a dead engine out again, from its beginning, once the router knows."""
        work.ready_s, work.sampled_tokens = 0.0, 0
        known_s = max(self._now_s + _ERROR_S, self._policy.noticed_s(engine))
        self._at(known_s, partial(self._fail, work, engine, is_lost=True))

    def _fail(self, work: Work, engine: int, *, is_lost: bool = False) -> None:
        self._failed += 1
        self._policy.note_failed(work, engine, now_s=self._now_s, is_lost=is_lost)
        self._at(self._now_s + RETRY_PAUSE_S, partial(self._give, work))

    def _work_on(self, number: int) -> None:
        engine = self._engines[number]
        if engine.is_busy or not engine.has_work(self._now_s):
            return
        engine.is_busy = True
        end_s, ended = engine.step(self._now_s)
        self._at(end_s, partial(self._end_step, number, engine.starts, ended))

    def _end_step(self, number: int, start: int, ended: Sequence[Work]) -> None:
        engine = self._engines[number]
        if engine.starts != start or engine.down_since_s is not None:
            for work in ended:  # It died within the step.
                self._lose(work, number)
            return
        engine.is_busy = False
        for work in ended:
            self._waits_s.append(self._now_s - work.asked_s)
            self._policy.note_ended(work, number)
            work.when_ended()
        self._work_on(number)


class Turn(Struct, frozen=True, kw_only=True):
    """One turn as it is asked for."""

    context_tokens: int
    output_tokens: int
    tool_s: float


def _turns(trace: EpisodeTrace) -> Iterator[Turn]:
    context_tokens = trace.prompt_tokens
    for turn in trace.turns:
        context_tokens += turn.added_tokens
        yield Turn(
            context_tokens=context_tokens, output_tokens=turn.output_tokens, tool_s=turn.tool_s
        )
        context_tokens += turn.output_tokens


def in_order(traces: Sequence[EpisodeTrace], *, seed: int) -> list[EpisodeTrace]:
    """The episodes with their groups in another order, each group together; 0: as they are."""
    groups: dict[str, list[EpisodeTrace]] = {}
    for trace in traces:
        groups.setdefault(trace.group, []).append(trace)
    names = list(groups)
    if not seed:
        return list(traces)
    random.Random(seed).shuffle(names)
    return [trace for name in names for trace in groups[name]]


def compared(fleet: Fleet, traces: Sequence[Sequence[EpisodeTrace]]) -> dict[str, Outcome]:
    """The outcome of each policy, the mean over the traces."""
    found = {}
    for name, policy in POLICIES.items():
        outcomes = [Simulation(fleet, _made(policy, fleet), episodes).run() for episodes in traces]
        count = len(outcomes)
        found[name] = Outcome(
            turns_per_s=sum(each.turns_per_s for each in outcomes) / count,
            p99_s=sum(each.p99_s for each in outcomes) / count,
            hit_rate=sum(each.hit_rate for each in outcomes) / count,
            failed=sum(each.failed for each in outcomes) / count,
        )
    return found


def _made(policy: Callable[[int], Policy], fleet: Fleet) -> Policy:
    if policy is Gateway:
        return Gateway(len(fleet.speeds), pool_tokens_per_s=fleet.pool_tokens_per_s)
    return policy(len(fleet.speeds))


def report(measurement: Measurement, case: str, outcomes: dict[str, Outcome]) -> None:
    """Rows of each policy, and the gateway's against sticky."""
    for name, outcome in outcomes.items():
        measurement.row(f"{case}, {name}", "turns_per_s", outcome.turns_per_s, "1/s")
        measurement.row(f"{case}, {name}", "p99_s", outcome.p99_s, "s")
        measurement.row(f"{case}, {name}", "hit_rate", outcome.hit_rate, "")
        if CASES[case].failures or CASES[case].restarts:
            measurement.row(f"{case}, {name}", "failed_a_turn", outcome.failed, "")
    own, sticky = outcomes["gateway"], outcomes["sticky"]
    measurement.row(case, "turns_over_sticky", own.turns_per_s / sticky.turns_per_s, "x")
    measurement.row(case, "p99_over_sticky", own.p99_s / sticky.p99_s, "x")
    measurement.row(case, "hit_rate", own.hit_rate, "")
    if CASES[case].failures or CASES[case].restarts:
        measurement.row(case, "failed_a_turn", own.failed, "")


def main() -> int:
    """Simulate the named cases, or all of them."""
    parser = parser_of(__doc__ or "")
    parser.add_argument("--traces", type=Path, help="JSON lines of a run's traces")
    parser.add_argument(
        "--speed", type=float, default=1.0, help="of every engine, relative to the assumed one"
    )
    options = parser.parse_args()
    measurement = Measurement(
        # The thresholds are for the synthetic episodes.
        name="routing_traces" if options.traces else "routing",
        question="Which choice of an engine for each turn finishes more turns?",
    )
    if options.traces:
        lines = options.traces.read_bytes()
        recorded = msgspec.json.Decoder(EpisodeTrace).decode_lines(lines)
        traces = [in_order(recorded, seed=seed) for seed in _ORDERS]
    else:
        traces = [synthetic(groups=_GROUPS, group_size=_GROUP_SIZE, seed=seed) for seed in _SEEDS]
    measurement.conditions["episodes"] = ", ".join(str(len(each)) for each in traces)
    measurement.conditions["speed"] = f"{options.speed:g}"
    for case, fleet in CASES.items():
        if not options.case or case in options.case:
            speeds = tuple(options.speed * speed for speed in fleet.speeds)
            asked = msgspec.structs.replace(fleet, speeds=speeds)
            report(measurement, case, compared(asked, traces))
    return measurement.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
