"""Gateway processes of one run on the real broker: several, killed, and started again."""

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forgemq_contracts import topics
from forgemq_launcher.upkeep.machine import listening_socket
from tests.integration.test_gateway import HELLO, GatewayProcess, on_broker
from tests.unit.gateway.scripted_lane import GROUP_PARTITIONS, Asked
from tests.unit.gateway.test_replicas import key_in
from tests.unit.gateway.world import World, configuration_of
from tests.unit.rendering.folders import write_model_folder

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(180)]

RESTART_S_MAX = 20.0
"""Seconds from the kill to `serving` on a busy machine; the process itself starts in some 3 s. A
broker lets a dead transaction last 60 s: a restart that waited for its end would be seen."""


async def owners(world: World) -> dict[int, str]:
    """Who owns each partition."""
    records = await world.records(topics.OWNED_RUNS)
    return {number: each.url for each in records[-1].owners for number in each.partitions}


async def test_gateways_come_and_are_killed_and_no_agent_loses_a_turn(
    kafka_bootstrap: str, new_run_id: Callable[[], str], tmp_path: Path
) -> None:
    """Turns wait at the first gateway while a second one comes, and at both while that one dies."""
    release = asyncio.Event()

    async def answer(_: Asked) -> str:
        await release.wait()
        return "yes"

    configuration = configuration_of(write_model_folder(tmp_path / "model"), run=new_run_id())
    first, second = (listening_socket("127.0.0.1", wanted=0) for _ in range(2))
    where: dict[str, Any] = {"bootstrap": kafka_bootstrap, "blobs": str(tmp_path / "blobs")}
    async with on_broker(configuration, answer, listener=first, **where) as (world, lane, older):
        urls = [f"http://127.0.0.1:{each.getsockname()[1]}" for each in (first, second)]
        keys = [key_in([number], run=configuration.run) for number in range(GROUP_PARTITIONS)]
        claims = [await world.claim(await world.open_group(key)) for key in keys]
        clients = [world.client(claim, retries=2) for claim in claims]
        asking = [
            asyncio.create_task(client.chat.completions.create(model="m", messages=HELLO))
            for client in clients
        ]
        await lane.has_seen(len(claims))
        newer = GatewayProcess(older.environ, listener=second)
        world.base_url = urls[1]
        await newer.start(world)
        shared = set((await owners(world)).values())
        assert await newer.end(signal.SIGKILL) == -signal.SIGKILL
        second.close()
        release.set()
        told = [await each for each in asking]
        again = [
            await client.chat.completions.create(
                model="m", messages=[*HELLO, answer.choices[0].message, *HELLO]
            )
            for client, answer in zip(clients, told, strict=True)
        ]
        finals = set((await owners(world)).values())
        cancelled = await world.records(topics.CANCELLED_COMPLETIONS)
    first.close()
    assert (shared, finals) == (set(urls), {urls[0]})
    asked = {f"chatcmpl-{each.record.request_id}" for each in lane.seen}
    assert {answer.id for answer in (*told, *again)} == asked
    assert len(asked) == 2 * GROUP_PARTITIONS
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
        changes = [record.owners[0] for record in await world.records(topics.OWNED_RUNS)]
    listener.close()
    assert answer.choices[0].message.content == "yes"
    # What each gateway wrote first, when it took over what the one before had.
    first, second, third = [
        next(owner for owner in changes if owner.gateway == gateway)
        for gateway in dict.fromkeys(owner.gateway for owner in changes)
    ]
    assert first.unfenced == ()
    assert first.gateway in second.unfenced
    assert second.gateway in third.unfenced
