"""Which way to choose an engine for each turn finds more in the caches of three real engines?

Three SGLang servers on a CPU with the demo's model get the same episodes by each policy of
`routing_policies.py`, which sees the engines' counters once a second, as a heartbeat has them. Each
policy begins with empty caches. What the engines say of their caches is exact on any machine. Turns
a second are of this machine alone, on which the engines share the cores.
"""

import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from measurement import Measurement, parser_of
from msgspec import Struct
from real_engines import real_engines
from routing_engine import EngineSpeed, SimulatedEngine, Work
from routing_policies import POLICIES, Policy, RoundRobin, Sticky

from forgemq_inference.core.engine_load import EngineCounters
from forgemq_inference.engine import Engine

_MODEL = Path(__file__).parents[1] / "deploy" / "demo" / "model"
_ENGINES = 3
_GROUPS = 24
_GROUP_SIZE = 4
_TURNS = 6
_EPISODES_AT_ONCE = 12
_PROMPT_TOKENS = 400
_ADDED_TOKENS = 60
_OUTPUT_TOKENS = 8
_TOOL_S = 0.05
_HEARTBEAT_S = 1.0
_TIMEOUT_S = 120.0
_VOCABULARY = range(5, 690)


class RealLane(SimulatedEngine):
    """What a policy sees of an engine: its counters, as the newest heartbeat had them."""

    newest: EngineCounters | None = None

    def counters(self) -> EngineCounters:
        """The engine's own numbers."""
        assert self.newest is not None, "a heartbeat comes before the first turn"
        return self.newest


class Played(Struct, frozen=True, kw_only=True):
    """All turns of one policy.

    `hit_rate`: cached tokens over context tokens, as the engines say.
    """

    turns_per_s: float
    median_s: float
    hit_rate: float
    turns_by_engine: tuple[int, ...]


class Play:
    """Plays the same episodes on the engines by one policy.

    Args:
        policy: Chooses the engine of each turn.
        engines: Idle.
        cache_key: K/V is found under the same key only: another one begins with empty caches.
    """

    def __init__(self, policy: Policy, engines: Sequence[Engine], *, cache_key: str) -> None:
        self._policy = policy
        self._cache_key = cache_key
        self._engines = engines
        self._lanes = [RealLane(EngineSpeed()) for _ in engines]
        self._places = asyncio.Semaphore(_EPISODES_AT_ONCE)
        self._waits_s: list[float] = []
        self._cached = self._asked = 0
        self._turns = [0] * len(engines)

    async def run(self) -> Played:
        """Play until every episode has ended."""
        await self._hear()
        started_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            beating = tasks.create_task(self._beat())
            async with asyncio.TaskGroup() as episodes:
                for number in range(_GROUPS * _GROUP_SIZE):
                    episodes.create_task(self._play(number))
            beating.cancel()
        return Played(
            turns_per_s=len(self._waits_s) / (time.monotonic() - started_s),
            median_s=statistics.median(self._waits_s),
            hit_rate=self._cached / self._asked,
            turns_by_engine=tuple(self._turns),
        )

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            await self._hear()

    async def _hear(self) -> None:
        for lane, engine in zip(self._lanes, self._engines, strict=True):
            lane.newest = await engine.counters()
        self._policy.note_report(self._lanes, now_s=time.monotonic())

    async def _play(self, number: int) -> None:
        group = number // _GROUP_SIZE
        context = _tokens(f"prompt {group}", _PROMPT_TOKENS)
        async with self._places:
            for turn in range(_TURNS):
                context += await self._ask(number, group, context)
                context += _tokens(f"result {number} {turn}", _ADDED_TOKENS)
                await asyncio.sleep(_TOOL_S)
        if isinstance(self._policy, Sticky):
            self._policy.forget(number)

    async def _ask(self, number: int, group: int, context: Sequence[int]) -> list[int]:
        """Have a turn answered; returns what was sampled."""
        work = Work(
            episode=number,
            group=group,
            prompt_tokens=_PROMPT_TOKENS,
            context_tokens=len(context),
            output_tokens=_OUTPUT_TOKENS,
            asked_s=time.monotonic(),
        )
        engine = self._policy.choose(work, now_s=work.asked_s)
        sampling = {"temperature": 0, "max_new_tokens": _OUTPUT_TOKENS, "ignore_eos": True}
        answer = await self._engines[engine].generate(
            {
                "input_ids": list(context),
                "sampling_params": sampling,
                "extra_key": self._cache_key,
            },
            timeout_s=_TIMEOUT_S,
        )
        self._policy.note_ended(work, engine)
        self._waits_s.append(time.monotonic() - work.asked_s)
        self._turns[engine] += 1
        self._cached += answer.meta_info.cached_tokens
        self._asked += len(context)
        return list(answer.output_ids)


def _tokens(seed: str, count: int) -> list[int]:
    dice = random.Random(seed)
    return dice.choices(_VOCABULARY, k=count)


async def measure(folder: Path) -> dict[str, Played]:
    """What each policy gives; an untimed round before pays for what is compiled once."""
    found: dict[str, Played] = {}
    async with real_engines(_MODEL, folder, count=_ENGINES) as engines:
        for name, policy in (("untimed", RoundRobin), *POLICIES.items()):
            found[name] = await Play(policy(_ENGINES), engines, cache_key=name).run()
    del found["untimed"]
    return found


def main() -> int:
    """Play the episodes by each policy."""
    options = parser_of(__doc__ or "").parse_args()
    measurement = Measurement(
        name="routing_on_engines",
        question="Which choice of an engine finds more in the caches of real engines?",
    )
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(Path(folder)))
    for name, played in found.items():
        measurement.row(name, "hit_rate", played.hit_rate, "")
        measurement.row(name, "turns_per_s", played.turns_per_s, "1/s")
        measurement.row(name, "median_s", played.median_s, "s")
        measurement.row(name, "turns_of_busiest", max(played.turns_by_engine), "")
    own, sticky = found["gateway"], found["sticky"]
    measurement.row("gateway", "hit_rate_over_sticky", own.hit_rate / sticky.hit_rate, "x")
    measurement.row("gateway", "turns_over_sticky", own.turns_per_s / sticky.turns_per_s, "x")
    return measurement.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
