"""The network between a client and the gateway: one address across restarts, and one fault."""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

import aiohttp
from aiohttp import web

Fault = Literal["none", "refused", "failed", "cut_waiting", "cut_answer"]

MODEL_CALLS = ("/chat/completions", "/responses", "/messages")
_NOT_PASSED_ON = {"transfer-encoding", "content-length", "connection", "host", "content-encoding"}
_BODY_BYTES_MAX = 64 * 1024 * 1024
_CUT_AFTER_S = 1.0  # If no byte came: a request that is not streamed has none before its answer.
_RETRY_S = 0.05
# What a client has not read yet when its connection is cut is lost to it.
_READS_S = 0.5


class Link:
    """Passes requests on to the gateway of the moment, and does one fault at one model call.

    Args:
        gateway_url: The gateway's address; another one after a restart.
        fault: What happens to the model call number `fault_at`, counted from 0.

    Attributes:
        has_passed: Is set with each part of an answer that the client was given.
        is_streamed: Whether the newest call of the model asked for a stream.
    """

    def __init__(self, gateway_url: Callable[[], str], *, fault: Fault, fault_at: int) -> None:
        self.model_calls, self.is_streamed = 0, False
        self.has_cut, self.has_passed = asyncio.Event(), asyncio.Event()
        self._gateway_url = gateway_url
        self._fault, self._fault_at = fault, fault_at

    async def start(self) -> str:
        """Listen on a free port, and return the address."""
        app = web.Application(client_max_size=_BODY_BYTES_MAX)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._session = aiohttp.ClientSession(
            auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None)
        )
        self._runner = web.AppRunner(app, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def stop(self) -> None:
        await self._session.close()
        await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        fault: Fault = "none"
        if request.method == "POST" and request.path.endswith(MODEL_CALLS):
            fault = self._fault if self.model_calls == self._fault_at else "none"
            self.model_calls += 1
            self.is_streamed = bool(json.loads(body).get("stream"))
        if fault == "refused":
            return web.json_response(
                {"error": {"type": "rate_limit_error", "message": "busy"}},
                status=429,
                headers={"Retry-After": "1"},
            )
        if fault == "failed":
            return web.json_response(
                {"error": {"type": "server_error", "message": "failed"}}, status=500
            )
        return await self._pass_on(request, body, fault)

    async def _pass_on(self, request: web.Request, body: bytes, fault: Fault) -> web.StreamResponse:
        try:
            async with await self._sent(request, body, fault) as answer:
                return await self._returned(request, answer, fault)
        except (aiohttp.ClientError, TimeoutError):
            return self._cut(request)

    async def _sent(
        self, request: web.Request, body: bytes, fault: Fault
    ) -> aiohttp.ClientResponse:
        """The gateway's answer; waits while no gateway listens, as a held socket does."""
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _NOT_PASSED_ON}
        while True:
            try:
                async with asyncio.timeout(_CUT_AFTER_S if fault == "cut_waiting" else None):
                    return await self._session.request(
                        request.method,
                        self._gateway_url() + request.raw_path,
                        data=body,
                        headers=headers,
                        allow_redirects=False,
                    )
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(_RETRY_S)

    async def _returned(
        self, request: web.Request, answer: aiohttp.ClientResponse, fault: Fault
    ) -> web.StreamResponse:
        headers = {k: v for k, v in answer.headers.items() if k.lower() not in _NOT_PASSED_ON}
        response = web.StreamResponse(status=answer.status, headers=headers)
        if fault == "none":
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
                self.has_passed.set()
            await response.write_eof()
            return response
        if fault == "cut_waiting":
            first = await answer.content.readany()
        else:
            whole = await answer.read()
            first = whole[: len(whole) // 2]
        response.content_length = None
        await response.prepare(request)
        await response.write(first)
        if fault == "cut_answer":
            await asyncio.sleep(_READS_S)
        return self._cut(request)

    def _cut(self, request: web.Request) -> web.StreamResponse:
        self.has_cut.set()
        with suppress(AttributeError):  # The client may have left first.
            request.transport.abort()  # type: ignore[union-attr]
        return web.Response()
