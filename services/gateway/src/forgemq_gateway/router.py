"""The one ASGI application: agents' requests go to their protocol, others to the admin API."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TypeAlias
from urllib.parse import unquote

from forgemq_bus.errors import FINAL_ERRORS
from forgemq_gateway.access import Access, no_episode_key
from forgemq_gateway.core.errors import RefusedError, busy, ending, unknown
from forgemq_gateway.core.live import LiveCaller
from forgemq_gateway.gate import Gate
from forgemq_gateway.live_traffic import LiveTraffic
from forgemq_gateway.passing import Passing
from forgemq_gateway.standstill import Standstill
from forgemq_gateway.turn_route import TurnRoute
from forgemq_gateway.wire import (
    Answering,
    Application,
    ClientGoneError,
    Receive,
    Scope,
    Send,
    headers_of,
    send_json,
    send_refusal,
)
from forgemq_gateway.wire_protocol import TokenCounter, WireProtocol

_SESSION = "/s/"
_MODELS = "/v1/models"
_MESSAGES = "/v1/messages"
_ANTHROPIC_VERSION = "anthropic-version"

# What agents ask for, spoken here or not: their keys are episodes' and never the admin key.
_AGENTS_PATHS = (
    *("/v1/chat", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"),
    *("/chat", "/completions", "/responses", "/messages"),
)

Route: TypeAlias = Callable[[Scope, Receive, Send, str | None], Awaitable[None]]


class Router:
    """Routes by method and path; holds requests back while the gateway is not ready.

    Args:
        protocols: What agents may speak; the first one's error shape is that of other paths.
        gate: Lets agents' requests in.
        traffic: Finds the episodes of live keys.
        passing: Sends a request on if another gateway owns its group.
        counters: Where agents ask for the number of a request's tokens.
        ready: Set while the state is that of the log.
        standstill: Whether it may not be, because the process stood still.
        hold_s: A request waits this long for both, then 503.
        models: The names that `GET /v1/models` lists.
    """

    def __init__(
        self,
        turns: TurnRoute,
        *,
        gate: Gate,
        traffic: LiveTraffic,
        protocols: Sequence[WireProtocol],
        counters: Sequence[TokenCounter],
        admin: Application,
        access: Access,
        passing: Passing,
        ready: asyncio.Event,
        standstill: Standstill,
        hold_s: float,
        models: Sequence[str],
    ) -> None:
        self._models_listed = models
        self._protocols = protocols
        self._admin = admin
        self._access = access
        self._passing = passing
        self._ready = ready
        self._standstill = standstill
        self._hold_s = hold_s
        self._routes: Mapping[tuple[str, str], Route] = {
            **{
                ("POST", each.path): partial(
                    gate.serve,
                    route=(route := partial(turns.serve, protocol=each)),
                    live=partial(traffic.serve, protocol=each, route=route),
                    shape=each.error,
                )
                for each in protocols
            },
            **{
                ("POST", each.path): partial(
                    gate.serve,
                    route=partial(turns.count, counter=each),
                    live=_refuse_to_count,
                    shape=each.error,
                )
                for each in counters
            },
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection; lifespan events are the admin application's."""
        if scope["type"] != "http":
            await self._admin(scope, receive, send)
            return
        path, method = str(scope["path"]), str(scope["method"])
        if path == "/health":
            await self._health(send)
            return
        if path == "/live":
            await send_json(send, {"status": "live"})
            return
        if method == "HEAD":
            await send_json(send, None)
            return
        key, path = self._key_and_path(scope, path)
        answer = Answering(send)
        try:
            await self._answer(scope, receive, answer.send, (key, path))
        except RefusedError as error:
            await answer.refuse(error, shape=self._shape_of(scope, path))
        except FINAL_ERRORS:
            await answer.refuse(ending(), shape=self._shape_of(scope, path))
            raise
        except (ClientGoneError, asyncio.CancelledError):
            # Its client has left, or a server that stops waits no longer for the answer. The
            # cancellation ends here, since the server that asked for it would answer with 500.
            pass
        await answer.refuse(ending(), shape=self._shape_of(scope, path))

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, asked: tuple[str | None, str]
    ) -> None:
        """Answer a request of this key and path, here or at the owner of its group.

        Raises:
            RefusedError: as the routes say; 503, the state is not that of the log.
            ClientGoneError: the client left before its request was complete.
        """
        if not await self._is_ready():
            raise busy("the gateway rebuilds its state, or waits for its log", status=503)
        await self._passing.serve(scope, receive, send, self._serve, asked)

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, asked: tuple[str | None, str]
    ) -> None:
        """Serve a request of this key and path here."""
        (key, path), method = asked, str(scope["method"])
        route = self._routes.get((method, path))
        if route is not None:
            await route(scope, receive, send, key)
        elif path == _MODELS or path.startswith(f"{_MODELS}/"):
            await self._models(scope, send, key, path)
        elif self._access.is_agents_key(key) and not self._access.is_admin(headers_of(scope)):
            await send_refusal(
                send, self._unspoken(method, path), shape=self._shape_of(scope, path)
            )
        elif _is_below(path, _AGENTS_PATHS):
            error = no_episode_key()
            await send_refusal(send, error, shape=self._shape_of(scope, path))
        else:
            await self._admin(scope, receive, send)

    def _key_and_path(self, scope: Scope, path: str) -> tuple[str | None, str]:
        """The key of a request, from `/s/<key>/...` or its headers, and the path without it."""
        key = ""
        if path.startswith(_SESSION):
            segment, _, rest = path[len(_SESSION) :].partition("/")
            key, path = unquote(segment), f"/{rest}"
        return key or self._access.key_in(headers_of(scope)), path

    async def _is_ready(self) -> bool:
        """Whether the state is that of the log, now or within the hold."""
        # Nearly always at once; a timer would cost more than all of the routing.
        if self._ready.is_set() and not self._standstill.may_be_missed():
            return True
        try:
            async with asyncio.timeout(self._hold_s):
                await self._standstill.is_over()
                return await self._ready.wait()
        except TimeoutError:
            return False

    def _unspoken(self, method: str, path: str) -> RefusedError:
        spoken = ", ".join(f"POST {protocol.path}" for protocol in self._protocols)
        return unknown(f"agents have no {method} {path}; there are {spoken} and GET {_MODELS}")

    def _shape_of(self, scope: Scope, path: str) -> Callable[[RefusedError], object]:
        """How the client that asks for this path reads an error."""
        # All of Anthropic's clients send its header, and paths as /v1/models are also OpenAI's.
        wanted = _MESSAGES if _ANTHROPIC_VERSION in headers_of(scope) else path
        for protocol in self._protocols:
            if _is_below(wanted, (protocol.path, protocol.path.removeprefix("/v1"))):
                return protocol.error
        return self._protocols[0].error

    async def _health(self, send: Send) -> None:
        if self._ready.is_set():
            await send_json(send, {"status": "serving"})
        else:
            await send_json(send, {"status": "not ready"}, status=503)

    async def _models(self, scope: Scope, send: Send, key: str | None, path: str) -> None:
        """Answer with the names of the model, or with the one that is asked for: any is taken."""
        name, method = path.removeprefix(_MODELS).strip("/"), str(scope["method"])
        try:
            caller = self._access.live_caller(key, scope)
            episode = None if caller is not None else self._access.episode(key)
            if method != "GET":
                raise self._unspoken(method, _MODELS)
        except RefusedError as error:
            await send_refusal(send, error, shape=self._shape_of(scope, path))
            return
        created_s = 0 if episode is None else episode.opened.opened_ms // 1000
        if name:
            await send_json(send, _model(name, created_s=created_s))
            return
        models = [_model(each, created_s=created_s) for each in self._models_listed]
        await send_json(send, _models_of(models))


async def _refuse_to_count(_scope: Scope, _receive: Receive, _send: Send, _: LiveCaller) -> None:
    """404: to count tokens is no part of a conversation, so there is no episode to do it in."""
    raise unknown("tokens are counted for the key of an episode, and this key is of live traffic")


def _model(name: str, *, created_s: int) -> dict[str, object]:
    """One model with the fields of OpenAI's list and of Anthropic's: both have the same path."""
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": created_s,
        "created_at": datetime.fromtimestamp(created_s, UTC).isoformat(),
        "owned_by": "forgemq",
    }


def _models_of(models: Sequence[dict[str, object]]) -> dict[str, object]:
    ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"], "has_more": False}
    return {"object": "list", "data": models, **ends}


def _is_below(path: str, starts: Iterable[str]) -> bool:
    return any(path == start or path.startswith(f"{start}/") for start in starts)
