"""A repeated end of an episode is answered when its record is on the log, and not before."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forgemq_bus.errors import LogError
from forgemq_bus.log import Emit
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from tests.unit.gateway.hindered_log import HinderedLog
from tests.unit.gateway.scripted_lane import wall_ms
from tests.unit.gateway.world import configuration_of, running


async def test_a_repeated_end_is_503_until_the_record_is_written(model: Path) -> None:
    store, released = MemoryLog(run="r", clock_ms=wall_ms), asyncio.Event()

    async def wait(emit: Emit) -> None:
        if emit.topic == topics.FINISHED_EPISODES.name:
            await released.wait()

    async with running(
        lambda: HinderedLog(store.open(), wait), configuration_of(model), lambda _: "yes"
    ) as (world, _):
        claim = await world.episode()
        path = f"/v1/episodes/{claim['episode_id']}/finish"
        first = asyncio.ensure_future(world.admin("POST", path, {"result": 1}))
        await asyncio.sleep(0.1)
        early = await world.admin("POST", path, {"result": 1})
        written_early = await world.records(topics.FINISHED_EPISODES)
        released.set()
        late = await world.admin("POST", path, {"result": 1})
        written: Sequence[Any] = await world.records(topics.FINISHED_EPISODES)
    assert (early.status_code, early.headers["retry-after"]) == (503, "1")
    assert "not written yet" in early.json()["error"]["message"]
    assert written_early == []
    assert ((await first).status_code, late.status_code) == (200, 200)
    assert [record.result for record in written] == [b"1"]


async def test_an_end_that_could_not_be_written_is_written_by_the_next_request(
    model: Path,
) -> None:
    store, broken = MemoryLog(run="r", clock_ms=wall_ms), {topics.FINISHED_EPISODES.name}

    async def fail(emit: Emit) -> None:
        if emit.topic in broken:
            raise LogError("no room")

    async with running(
        lambda: HinderedLog(store.open(), fail), configuration_of(model), lambda _: "yes"
    ) as (world, _):
        claim = await world.episode()
        path = f"/v1/episodes/{claim['episode_id']}/finish"
        failed = await world.admin("POST", path, {"result": 1})
        broken.clear()
        repeated = await world.admin("POST", path, {"result": 1})
        written: Sequence[Any] = await world.records(topics.FINISHED_EPISODES)
    assert (failed.status_code, repeated.status_code) == (503, 200)
    assert [record.result for record in written] == [b"1"]
