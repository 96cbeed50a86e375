"""Starts SGLang engines of the machine's own kind for a load test, and stops them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from forgemq_inference.engine import Engine
from forgemq_settings.ports import free_port
from forgemq_sglang_cpu.options import EngineOptions
from forgemq_sglang_cpu.server import EngineServer

_HOST = "127.0.0.1"


@asynccontextmanager
async def real_engines(
    model: Path, folder: Path, *, count: int, options: EngineOptions | None = None
) -> AsyncIterator[list[Engine]]:
    """So many engines with this model, side by side, until the block ends; logs are in `folder`."""
    chosen = EngineOptions() if options is None else options
    servers = [
        EngineServer(str(model), folder / f"engine-{n}", port=free_port(_HOST), options=chosen)
        for n in range(count)
    ]
    async with AsyncExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            server.start()
        for server in servers:
            await asyncio.to_thread(server.wait_healthy)
        yield [await stack.enter_async_context(Engine(server.url)) for server in servers]
