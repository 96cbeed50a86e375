"""The gateway as its own process on the real broker, on a socket that the test holds."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx

from forgemq_bus.blobs import BlobStore
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_contracts import topics
from forgemq_contracts.run import RunConfiguration, StartedRun
from tests.unit.gateway.scripted_lane import Asked, ScriptedLane, wall_ms
from tests.unit.gateway.world import ADMIN_KEY, World, partitions_of


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
async def gateway_on_broker(
    configuration: RunConfiguration,
    *,
    bootstrap: str,
    blobs: str,
    listener: socket.socket,
    environ: Mapping[str, str] = {},
) -> AsyncIterator[tuple[World, GatewayProcess]]:
    """A started run and a gateway process that is not started, with these further variables."""

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
            **environ,
        },
        listener=listener,
    )
    try:
        yield world, process
    finally:
        await world.log.close()


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
    async with (
        gateway_on_broker(configuration, bootstrap=bootstrap, blobs=blobs, listener=listener) as (
            world,
            process,
        ),
        asyncio.TaskGroup() as tasks,
    ):
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
