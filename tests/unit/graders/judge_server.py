"""A judge behind a real HTTP server."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from aiohttp import web


class JudgeServer:
    """Answers with the next of `replies`, the last one again and again: a text, or a status."""

    def __init__(self) -> None:
        self.replies: list[str | int] = ["Score: 7"]
        self.requests: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.at_once = 0
        self.at_once_most = 0
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        self.headers.append(request.headers.get("Authorization", ""))
        self.at_once += 1
        self.at_once_most = max(self.at_once_most, self.at_once)
        await self.hold.wait()
        self.at_once -= 1
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, int):
            return web.Response(status=reply, text="no, says the server")
        message = {"role": "assistant", "content": reply}
        return web.json_response({"choices": [{"message": message}]})


@asynccontextmanager
async def judge_server() -> AsyncIterator[JudgeServer]:
    server = JudgeServer()
    application = web.Application()
    application.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}/v1"
    yield server
    await runner.cleanup()


@contextmanager
def judge_server_in_thread(replies: Sequence[str | int]) -> Iterator[JudgeServer]:
    """The same for a caller without an event loop: it answers in a thread of its own."""
    started: list[JudgeServer] = []
    is_up, loop = threading.Event(), asyncio.new_event_loop()
    ends = asyncio.Event()

    async def serve() -> None:
        async with judge_server() as server:
            server.replies = list(replies)
            started.append(server)
            is_up.set()
            await ends.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert is_up.wait(timeout=20), "the judge did not start"
        yield started[0]
    finally:
        loop.call_soon_threadsafe(ends.set)
        thread.join(timeout=20)
        loop.close()
