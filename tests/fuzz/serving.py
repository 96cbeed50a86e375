"""A gateway that is sent fuzzed bodies, and what its log says of them afterwards."""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
from msgspec import Struct

from forgemq_bus.log import Place
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_gateway.large_work import favour_event_loop
from tests.fuzz.client import Plan, Played
from tests.unit.gateway.scripted_lane import Asked, ScriptedLane, wall_ms
from tests.unit.gateway.world import ADMIN_KEY, World, configuration_of, running

_REPLIES = [
    "yes",
    "",
    "<think>\nhm\n</think>\n\nyes",
    '<tool_call>\n{"name": "find", "arguments": {"q": "\u6f22 \U0001f600"}}\n</tool_call>',
    "<tool_call>\n{not JSON",
    "caf\u00e9 \u6f22\u5b57 \U0001f600 </think> <think>",
    "word " * 60,
]
_PROBED_S = 0.005


class Fuzzed(Struct, kw_only=True):
    """What some bodies did.

    Attributes:
        loop_cpu_s: The longest time for which the event loop worked without looking at others,
            in CPU time of its thread: other programs of the machine add nothing to it.
        loop_wall_s: The same by the clock.
    """

    answers: dict[str, int]
    defects: list[str]
    turns: int
    loop_cpu_s: float
    loop_wall_s: float


async def fuzz(model: Path, *, first: int, count: int) -> Fuzzed:
    """Send these bodies to a new gateway on a new log in memory."""
    favour_event_loop()
    log = MemoryLog(run="r", clock_ms=wall_ms)
    configuration = configuration_of(model, context_tokens_max=8192)
    probe = LoopProbe()
    async with running(log.open, configuration, _reply, lanes=2) as (world, lanes):
        admitting = asyncio.create_task(_admit_all(world, lanes))
        probing = asyncio.create_task(probe.run())
        plan = Plan(url=world.base_url, admin_key=ADMIN_KEY, first=first, count=count)
        played = await _played(plan)
        for task in (admitting, probing):
            task.cancel()
        defects = played.defects + await _losses(world, played)
        turns = len(await world.records(topics.FINISHED_COMPLETIONS))
    return Fuzzed(
        answers=played.answers,
        defects=defects,
        turns=turns,
        loop_cpu_s=probe.cpu_s_max,
        loop_wall_s=probe.wall_s_max,
    )


class LoopProbe:
    """Finds for how long an event loop at most did not come back to look at its other work."""

    def __init__(self) -> None:
        self.cpu_s_max = self.wall_s_max = 0.0

    async def run(self) -> None:
        """Look every 5 ms, until cancelled."""
        while True:
            cpu_s, wall_s = time.thread_time(), time.monotonic()
            await asyncio.sleep(_PROBED_S)
            self.cpu_s_max = max(self.cpu_s_max, time.thread_time() - cpu_s)
            self.wall_s_max = max(self.wall_s_max, time.monotonic() - wall_s - _PROBED_S)


async def _played(plan: Plan) -> Played:
    client = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.fuzz.client",
        msgspec.json.encode(plan).decode(),
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await client.communicate()
    if client.returncode:
        raise RuntimeError(f"the client ended with exit status {client.returncode}")
    return msgspec.json.decode(said, type=Played)


async def _admit_all(world: World, lanes: Sequence[ScriptedLane]) -> None:
    """Admit every group at once, as a scheduler with free slots does.

    What the lanes have seen is dropped meanwhile: the collector of cycles looks at all of it.
    """
    reader = await world.log.reader({Place(topics.REQUESTED_GROUPS.name, 0): 0})
    while True:
        for record in await reader.read(timeout_s=1.0, records_max=10):
            requested = topics.decode(topics.REQUESTED_GROUPS, record.value)
            await world.admit(requested.group_id)
        for lane in lanes:
            lane.seen.clear()


def _reply(asked: Asked) -> str:
    return Random(asked.record.request_id).choice(_REPLIES)


async def _losses(world: World, played: Played) -> Sequence[str]:
    """Turns that an agent has read and its episode lacks, and turns that were sampled twice.

    A turn whose client left and came back may be: its lane answered while it was asked to stop.
    """
    finals = {each.episode_id: each for each in await world.records(topics.FINISHED_EPISODES)}
    found = []
    for episode_id, turns in played.delivered.items():
        counted = {entry.completion_id for entry in finals[episode_id].manifest}
        found += [f"{episode_id}: {each} is lost" for each in turns if each not in counted]
    completions = await world.records(topics.FINISHED_COMPLETIONS)
    cancelled = {each.request_id for each in await world.records(topics.CANCELLED_COMPLETIONS)}
    times = Counter(each.request_id for each in completions if each.request_id not in cancelled)
    return found + [f"{each} was sampled {n} times" for each, n in times.items() if n > 1]
