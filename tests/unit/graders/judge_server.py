"""A judge behind a real HTTP server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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
