"""A repeated end of an episode is answered when its record is on the log, and not before."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forgemq_bus.log import Emit
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from tests.unit.gateway.scripted_lane import wall_ms
from tests.unit.gateway.world import configuration_of, running


class SlowWriter:
    """A writer whose finished episodes wait for `released`."""

    def __init__(self, writer: Any, released: asyncio.Event) -> None:
        self._writer, self._released = writer, released

    async def write(self, emit: Emit) -> Any:
        if emit.topic == topics.FINISHED_EPISODES.name:
            await self._released.wait()
        return await self._writer.write(emit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


class SlowLog:
    """A log with such writers."""

    def __init__(self, log: Any, released: asyncio.Event) -> None:
        self._log, self._released = log, released

    async def writer(self) -> SlowWriter:
        return SlowWriter(await self._log.writer(), self._released)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


async def test_a_repeated_end_is_503_until_the_record_is_written(model: Path) -> None:
    store, released = MemoryLog(run="r", clock_ms=wall_ms), asyncio.Event()
    async with running(
        lambda: SlowLog(store.open(), released), configuration_of(model), lambda _: "yes"
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
