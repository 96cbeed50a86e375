"""The gateway as its own process on the real broker, killed in the middle of a turn."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from forgemq_bus.blobs import BlobStore
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_contracts import topics
from forgemq_contracts.run import RunConfiguration, StartedRun
from forgemq_launcher.upkeep.machine import listening_socket
from tests.unit.gateway.scripted_lane import Asked, ScriptedLane, contexts_of, wall_ms
from tests.unit.gateway.world import ADMIN_KEY, World, configuration_of, partitions_of
from tests.unit.rendering.folders import write_model_folder

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

AWAY_S = 3.0
"""The default pauses of OpenAI's client are 0.5 s and 1 s; its third refusal ends the agent."""
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


class GatewayProcess:
    """`python -m forgemq_gateway` on a socket that the test holds, as a supervisor does."""

    def __init__(self, environ: dict[str, str], *, listener: socket.socket) -> None:
        self.environ = environ
        self._listener_fd = listener.fileno()
        handed = {"FORGEMQ_GATEWAY_LISTENER_FD": str(self._listener_fd)}
        self._environ = {**os.environ, **environ, **handed}
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, world: World) -> None:
        """Start it and wait until its state is rebuilt."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "forgemq_gateway",
            env=self._environ,
            pass_fds=[self._listener_fd],
        )
        async with httpx.AsyncClient() as client:
            for _ in range(300):
                assert self._process.returncode is None
                try:
                    if (await client.get(f"{world.base_url}/health")).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.1)
        raise AssertionError("the gateway is not healthy within 30 s")

    async def end(self, number: signal.Signals) -> int:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.send_signal(number)
        return await self._process.wait()

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def ended(self) -> int:
        """Wait for its own end; returns the status."""
        assert self._process is not None
        return await self._process.wait()


@asynccontextmanager
async def on_broker(
    configuration: RunConfiguration,
    script: Callable[[Asked], Any],
    *,
    bootstrap: str,
    blobs: str,
    listener: socket.socket,
) -> AsyncIterator[tuple[World, ScriptedLane, GatewayProcess]]:
    """A started run, a lane, and a gateway process."""

    def open_log() -> KafkaLog:
        return KafkaLog(
            KafkaConnection(bootstrap=bootstrap),
            run=configuration.run,
            blobs=BlobStore(blobs, run=configuration.run),
        )

    world = World(open_log, configuration)
    world.base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    await world.log.create_topics({topic.name: 1 for topic in topics.SHARED})
    await world.log.create_topics(partitions_of(configuration))
    started = StartedRun(
        run=configuration.run, configuration=configuration, blobs=blobs, started_ms=wall_ms()
    )
    await world.write(topics.STARTED_RUNS, 0, started)
    process = GatewayProcess(
        {
            "FORGEMQ_RUN": configuration.run,
            "FORGEMQ_KAFKA": bootstrap,
            "FORGEMQ_GATEWAY_ADMIN_KEY": ADMIN_KEY,
        },
        listener=listener,
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            lane = ScriptedLane(world.log, world.rendering, script)
            running = tasks.create_task(lane.run(tasks))
            await process.start(world)
            try:
                yield world, lane, process
            finally:
                for client in world.clients:
                    await client.close()
                await process.end(signal.SIGTERM)
                lane.stop()
                running.cancel()
    finally:
        await world.log.close()


async def test_a_client_with_default_retries_survives_the_gateways_sigkill_with_the_same_request(
    kafka_bootstrap: str, new_run_id: Callable[[], str], tmp_path: Path
) -> None:
    """A turn is in flight when the gateway dies; the client's first retry waits and is answered.

    The gateway is away for longer than both of the client's pauses together, 1.5 s.
    """
    release = asyncio.Event()

    async def script(asked: Asked) -> str:
        if "second" in asked.text:
            await release.wait()
        return "yes"

    configuration = configuration_of(
        write_model_folder(tmp_path / "model"), run=new_run_id(), context_tokens_max=20_000
    )
    listener = listening_socket("127.0.0.1", wanted=0)
    async with on_broker(
        configuration,
        script,
        bootstrap=kafka_bootstrap,
        blobs=str(tmp_path / "blobs"),
        listener=listener,
    ) as (world, lane, process):
        claim = await world.episode()
        client = world.client(claim, retries=openai.DEFAULT_MAX_RETRIES)
        await client.chat.completions.create(model="m", messages=HELLO)
        history: list[Any] = [
            *HELLO,
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "second " + "long " * 2000},
        ]
        asking = asyncio.ensure_future(client.chat.completions.create(model="m", messages=history))
        await lane.has_seen(2)
        assert await process.end(signal.SIGKILL) == -signal.SIGKILL
        await asyncio.sleep(AWAY_S)
        await process.start(world)
        release.set()
        answer = await asking
        await world.admin("POST", f"/v1/episodes/{claim['episode_id']}/finish", {})
        finished = await world.records(topics.FINISHED_COMPLETIONS)
        (ended,) = await world.records(topics.FINISHED_EPISODES)
    listener.close()
    assert answer.id == f"chatcmpl-{lane.seen[1].record.request_id}"
    assert {asked.record.request_id for asked in lane.seen[1:]} == {lane.seen[1].record.request_id}
    whole = contexts_of(finished)
    first, second = finished[0], finished[1]
    assert second.parent_id == first.request_id
    tokens = whole[first.request_id]
    assert whole[second.request_id][: len(tokens)] == tokens
    assert [entry.completion_id for entry in ended.manifest] == [
        first.request_id,
        second.request_id,
    ]
    assert [finished[entry.offset].request_id for entry in ended.manifest] == [
        entry.completion_id for entry in ended.manifest
    ]
