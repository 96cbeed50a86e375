"""Two gateway processes on one run of the real broker, and one that is killed and started again."""

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from forgemq_contracts import topics
from forgemq_launcher.upkeep.machine import listening_socket
from tests.integration.test_gateway import HELLO, GatewayProcess, on_broker
from tests.unit.gateway.scripted_lane import Asked
from tests.unit.gateway.world import configuration_of
from tests.unit.rendering.folders import write_model_folder

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(180)]

REPLACED = 2
"""Exit status of a service that refuses to go on: no supervisor starts it again."""
RESTART_S_MAX = 20.0
"""Seconds from the kill to `serving` on a busy machine; the process itself starts in some 3 s. A
broker lets a dead transaction last 60 s: a restart that waited for its end would be seen."""


async def test_the_newer_gateway_owns_the_run_and_the_older_one_tells_its_clients(
    kafka_bootstrap: str, new_run_id: Callable[[], str], tmp_path: Path
) -> None:
    release = asyncio.Event()

    async def answer(asked: Asked) -> str:
        await release.wait()
        return "yes"

    configuration = configuration_of(write_model_folder(tmp_path / "model"), run=new_run_id())
    first, second = (listening_socket("127.0.0.1", wanted=0) for _ in range(2))
    where: dict[str, Any] = {"bootstrap": kafka_bootstrap, "blobs": str(tmp_path / "blobs")}
    async with on_broker(configuration, answer, listener=first, **where) as (world, lane, older):
        claim = await world.episode()
        asking = asyncio.ensure_future(
            world.client(claim).chat.completions.create(model="m", messages=HELLO)
        )
        await lane.has_seen(1)
        newer = GatewayProcess(older.environ, listener=second)
        world.base_url = f"http://127.0.0.1:{second.getsockname()[1]}"
        await newer.start(world)
        with pytest.raises(openai.InternalServerError, match=f"at {world.base_url} has taken over"):
            await asking
        assert await older.ended() == REPLACED
        release.set()
        client = world.client({**claim, "base_url": f"{world.base_url}/v1"})
        told = await client.chat.completions.create(model="m", messages=HELLO)
        cancelled = await world.records(topics.CANCELLED_COMPLETIONS)
        assert await newer.end(signal.SIGTERM) == 0
    first.close()
    second.close()
    assert told.id == f"chatcmpl-{lane.seen[0].record.request_id}"
    assert cancelled == []


async def test_a_killed_owner_that_is_started_at_once_serves_at_once(
    kafka_bootstrap: str, new_run_id: Callable[[], str], tmp_path: Path
) -> None:
    """No lease and no transaction of the killed one holds the new one up."""
    configuration = configuration_of(write_model_folder(tmp_path / "model"), run=new_run_id())
    listener = listening_socket("127.0.0.1", wanted=0)
    where: dict[str, Any] = {"bootstrap": kafka_bootstrap, "blobs": str(tmp_path / "blobs")}
    async with on_broker(configuration, lambda _: "yes", listener=listener, **where) as scene:
        world, _, process = scene
        claim = await world.episode()
        for _ in range(2):
            assert await process.end(signal.SIGKILL) == -signal.SIGKILL
            killed_s = time.monotonic()
            await process.start(world)
            assert time.monotonic() - killed_s < RESTART_S_MAX
        client = world.client(claim)
        answer = await client.chat.completions.create(model="m", messages=HELLO)
        owners = [record.owner for record in await world.records(topics.OWNED_RUNS)]
    listener.close()
    assert answer.choices[0].message.content == "yes"
    assert owners == [1, 2, 3]
