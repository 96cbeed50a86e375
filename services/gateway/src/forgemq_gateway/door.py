"""The one ASGI application: agents' requests to the hot route, the rest to the admin API."""

import asyncio
from urllib.parse import unquote

from forgemq_gateway.access import Access, key_in
from forgemq_gateway.chat_route import ChatRoute
from forgemq_gateway.core.chat import DEFAULT_MODEL
from forgemq_gateway.core.errors import RefusedError, busy, unknown
from forgemq_gateway.wire import (
    Application,
    Receive,
    Scope,
    Send,
    headers_of,
    send_json,
    send_refusal,
)

_SESSION = "/s/"


class Door:
    """Routes by path; holds requests back while the state is being rebuilt.

    Args:
        ready: Set when the state is rebuilt.
        hold_s: A request waits so long for it, then 503.
    """

    def __init__(
        self,
        *,
        chat: ChatRoute,
        admin: Application,
        access: Access,
        ready: asyncio.Event,
        hold_s: float,
    ) -> None:
        self._chat = chat
        self._admin = admin
        self._access = access
        self._ready = ready
        self._hold_s = hold_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI connection; lifespan events are the admin application's."""
        if scope["type"] != "http":
            await self._admin(scope, receive, send)
            return
        path, method = str(scope["path"]), str(scope["method"])
        if path == "/health":
            await self._health(send)
            return
        if method == "HEAD":
            await send_json(send, None)
            return
        try:
            async with asyncio.timeout(self._hold_s):
                await self._ready.wait()
        except TimeoutError:
            await send_refusal(send, busy("the gateway rebuilds its state", status=503))
            return
        await self._route(scope, receive, send, path=path, method=method)

    async def _health(self, send: Send) -> None:
        if self._ready.is_set():
            await send_json(send, {"status": "serving"})
        else:
            await send_json(send, {"status": "restoring"}, status=503)

    async def _route(
        self, scope: Scope, receive: Receive, send: Send, *, path: str, method: str
    ) -> None:
        key: str | None = None
        if path.startswith(_SESSION):
            segment, _, rest = path[len(_SESSION) :].partition("/")
            key, path = unquote(segment), f"/{rest}"
        key = key or key_in(headers_of(scope))
        if path == "/v1/chat/completions" and method == "POST":
            await self._chat.serve(scope, receive, send, key=key)
        elif path == "/v1/models" and method == "GET":
            await self._models(send, key=key)
        elif self._access.is_episode_key(key):
            await send_refusal(send, unknown(f"agents have no {method} {path}"))
        else:
            await self._admin(scope, receive, send)

    async def _models(self, send: Send, *, key: str | None) -> None:
        try:
            episode = self._access.episode(key)
        except RefusedError as error:
            await send_refusal(send, error)
            return
        model = {
            "id": DEFAULT_MODEL,
            "object": "model",
            "created": episode.opened.opened_ms // 1000,
            "owned_by": "forgemq",
        }
        await send_json(send, {"object": "list", "data": [model]})
