"""The engine time of an episode whose completions come from hosts with different clocks."""

import asyncio
from pathlib import Path

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from tests.unit.gateway.scripted_lane import Asked
from tests.unit.gateway.world import configuration_of, running

ENDED_MS = (2_500, 2_000, 2_000, 4_500)
"""When each request ended by the clock of its host: the first and the last are 1.5 s ahead."""


async def test_the_engine_time_of_an_episode_depends_on_no_hosts_clock(model: Path) -> None:
    host_ms, both = 0, asyncio.Barrier(2)

    async def answer(asked: Asked) -> str:
        nonlocal host_ms
        sequence = asked.record.turn.sequence
        if sequence in (1, 2):
            await both.wait()
        host_ms = ENDED_MS[sequence]
        return "yes"

    log = MemoryLog(run="r", clock_ms=lambda: host_ms)
    async with running(log.open, configuration_of(model), answer) as (world, (lane,)):
        lane.engine_s = 1.0
        claim = await world.episode()
        client = world.client(claim)

        async def ask(text: str) -> None:
            messages = [{"role": "user", "content": text}]
            await client.chat.completions.create(model="m", messages=messages)  # type: ignore[arg-type]

        await ask("first")
        await asyncio.gather(ask("left"), ask("right"))
        await ask("last")
        await world.admin("POST", f"/v1/episodes/{claim['episode_id']}/finish", {})
        (episode,) = await world.records(topics.FINISHED_EPISODES)
        done = await world.records(topics.FINISHED_COMPLETIONS)
    assert episode.engine_s == 3.0
    after = {one.turn.sequence: one.turn.after_offset for one in done}
    assert after == {0: -1, 1: 0, 2: 0, 3: 2}
