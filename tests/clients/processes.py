"""Processes that a test kills and starts again: inference, and an engine without a model.

Run as `python -m tests.clients.processes PORT URL`, this is the engine: it has SGLang's interface
at the port, and asks the test at the URL what to answer.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import aiohttp
import msgspec
from aiohttp import web
from stand_in_answers import Generation, Speed
from stand_in_engine import StandInEngine, serving

# Room for the prompts of coding agents in the small vocabulary of the tests' model.
CONTEXT_TOKENS_MAX = 300_000
_BODY_BYTES_MAX = 64 * 1024 * 1024

# Output ids, and the stop string that ended them or "".
Answered = tuple[list[int], str]
Decide = Callable[[Generation], Awaitable[Answered]]


class Child:
    """A process of this command; `start` after `end` is another one with the same."""

    def __init__(self, *argv: str, environ: Mapping[str, str] | None = None) -> None:
        self._argv = argv
        # It imports what pytest's own path has, as the stand-in engine of the load tests.
        path = os.pathsep.join(filter(None, sys.path))
        self._environ = {**os.environ, "PYTHONPATH": path, **(environ or {})}
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it; others wait by themselves until it serves."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, *self._argv, env=self._environ
        )

    async def end(self, number: signal.Signals) -> None:
        """Send the signal and wait for the end; idempotent."""
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.send_signal(number)
        await self._process.wait()


@asynccontextmanager
async def deciding(decide: Decide) -> AsyncIterator[str]:
    """Tell engines of other processes what to answer; yields the address at which they ask."""

    async def answer(request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=Generation)
        return web.Response(body=msgspec.json.encode(await decide(body)))

    app = web.Application(client_max_size=_BODY_BYTES_MAX)
    app.router.add_post("/", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


async def _serve(port: int, url: str) -> None:
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def decide(body: Generation) -> Answered:
            async with session.post(url, data=msgspec.json.encode(body)) as reply:
                return msgspec.json.decode(await reply.read(), type=Answered)

        engine = StandInEngine(Speed(context_tokens_max=CONTEXT_TOKENS_MAX), answer=decide)
        async with serving(engine, port=port):
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), sys.argv[2]))
