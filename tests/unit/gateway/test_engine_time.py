"""The engine time of an episode whose completions come from hosts with different clocks."""

import asyncio
from pathlib import Path

import pytest

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from tests.unit.gateway.scripted_lane import Asked, wall_ms
from tests.unit.gateway.world import configuration_of, running

ENGINE_MS = 20
AHEAD_MS = (ENGINE_MS, 0, 0, ENGINE_MS)
"""How far the host of each request is ahead of the gateway: its end seems to be the next one's."""


async def test_the_engine_time_of_an_episode_depends_on_no_hosts_clock(model: Path) -> None:
    ahead_ms = 0

    async def answer(asked: Asked) -> str:
        nonlocal ahead_ms
        await asyncio.sleep(ENGINE_MS / 1000)
        ahead_ms = AHEAD_MS[asked.record.turn.sequence]
        return "yes"

    log = MemoryLog(run="r", clock_ms=lambda: wall_ms() + ahead_ms)
    async with running(log.open, configuration_of(model), answer) as (world, _):
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
    first, left, right, last = (
        one.engine_s for one in sorted(done, key=lambda one: one.turn.sequence)
    )
    assert min(first, left, right, last) > 0.0
    assert episode.engine_s == pytest.approx(first + max(left, right) + last)
    after = {one.turn.sequence: one.turn.after_offset for one in done}
    assert (after[0], after[1], after[3]) == (-1, after[2], 2)
