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
from forgemq_gateway.passing import KeyedPath, Passing
from forgemq_gateway.protocols import COUNTERS, PROTOCOLS
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
        gate: Lets agents' requests in.
        traffic: Finds the episodes of live keys.
        passing: Sends a request on if another gateway owns its group.
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
        admin: Application,
        access: Access,
        passing: Passing,
        ready: asyncio.Event,
        standstill: Standstill,
        hold_s: float,
        models: Sequence[str],
    ) -> None:
        self._model_names = models
        self._admin = admin
        self._access = access
        self._passing = passing
        self._ready = ready
        self._standstill = standstill
        self._hold_s = hold_s
        self._routes = _agents_routes(turns, gate=gate, traffic=traffic)

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
        asked, answer = self._keyed_path(scope, path), Answering(send)
        try:
            await self._answer(scope, receive, answer.send, asked)
        except RefusedError as error:
            await answer.refuse(error, shape=_shape_of(scope, asked.path))
        except FINAL_ERRORS:
            await answer.refuse(ending(), shape=_shape_of(scope, asked.path))
            raise
        except (ClientGoneError, asyncio.CancelledError):
            # Its client has left, or a server that stops waits no longer for the answer. The
            # cancellation ends here, since the server that asked for it would answer with 500.
            pass
        await answer.refuse(ending(), shape=_shape_of(scope, asked.path))

    async def _answer(self, scope: Scope, receive: Receive, send: Send, asked: KeyedPath) -> None:
        """Answer a request here, or at the owner of its group.

        Raises:
            RefusedError: as the routes say; 503, the state is not that of the log.
            ClientGoneError: the client left before its request was complete.
        """
        if not await self._is_ready():
            raise busy("the gateway rebuilds its state, or waits for its log", status=503)
        await self._passing.serve(scope, receive, send, self._serve_here, asked)

    async def _serve_here(
        self, scope: Scope, receive: Receive, send: Send, asked: KeyedPath
    ) -> None:
        """Answer a request here: the group is not one that another gateway owns."""
        path, method = asked.path, str(scope["method"])
        route = self._routes.get((method, path))
        if route is not None:
            await route(scope, receive, send, asked.key)
        elif _is_below(path, (_MODELS,)):
            await self._serve_models(scope, send, asked)
        elif self._access.is_agents_key(asked.key) and not self._access.is_admin(headers_of(scope)):
            await send_refusal(send, _unspoken(method, path), shape=_shape_of(scope, path))
        elif _is_below(path, _AGENTS_PATHS):
            await send_refusal(send, no_episode_key(), shape=_shape_of(scope, path))
        else:
            await self._admin(scope, receive, send)

    def _keyed_path(self, scope: Scope, path: str) -> KeyedPath:
        """The path without `/s/<key>`, and the key from there or from the headers."""
        key = ""
        if path.startswith(_SESSION):
            segment, _, rest = path[len(_SESSION) :].partition("/")
            key, path = unquote(segment), f"/{rest}"
        return KeyedPath(key or self._access.key_in(headers_of(scope)), path)

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

    async def _health(self, send: Send) -> None:
        if self._ready.is_set():
            await send_json(send, {"status": "serving"})
        else:
            await send_json(send, {"status": "not ready"}, status=503)

    async def _serve_models(self, scope: Scope, send: Send, asked: KeyedPath) -> None:
        """Answer with the names of the model, or with the one that is asked for: any is taken."""
        name, method = asked.path.removeprefix(_MODELS).strip("/"), str(scope["method"])
        try:
            caller = self._access.live_caller(asked.key, scope)
            episode = None if caller is not None else self._access.episode(asked.key)
            if method != "GET":
                raise _unspoken(method, _MODELS)
        except RefusedError as error:
            await send_refusal(send, error, shape=_shape_of(scope, asked.path))
            return
        created_s = 0 if episode is None else episode.opened.opened_ms // 1000
        if name:
            await send_json(send, _model(name, created_s=created_s))
            return
        models = [_model(each, created_s=created_s) for each in self._model_names]
        await send_json(send, _model_list(models))


def _agents_routes(
    turns: TurnRoute, *, gate: Gate, traffic: LiveTraffic
) -> Mapping[tuple[str, str], Route]:
    """What agents can ask for, by method and path: each behind the gate, by its kind of key."""
    routes: dict[tuple[str, str], Route] = {}
    for protocol in PROTOCOLS:
        route = partial(turns.serve, protocol=protocol)
        live = partial(traffic.serve, protocol=protocol, route=route)
        routes["POST", protocol.path] = partial(
            gate.serve, route=route, live=live, shape=protocol.error
        )
    for counter in COUNTERS:
        count = partial(turns.count, counter=counter)
        routes["POST", counter.path] = partial(
            gate.serve, route=count, live=_refuse_to_count, shape=counter.error
        )
    return routes


def _unspoken(method: str, path: str) -> RefusedError:
    spoken = ", ".join(f"POST {protocol.path}" for protocol in PROTOCOLS)
    return unknown(f"agents have no {method} {path}; there are {spoken} and GET {_MODELS}")


def _shape_of(scope: Scope, path: str) -> Callable[[RefusedError], object]:
    """How the client that asks for this path reads an error."""
    # All of Anthropic's clients send its header, and paths as /v1/models are also OpenAI's.
    wanted = _MESSAGES if _ANTHROPIC_VERSION in headers_of(scope) else path
    for protocol in PROTOCOLS:
        if _is_below(wanted, (protocol.path, protocol.path.removeprefix("/v1"))):
            return protocol.error
    return PROTOCOLS[0].error


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


def _model_list(models: Sequence[dict[str, object]]) -> dict[str, object]:
    ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"], "has_more": False}
    return {"object": "list", "data": models, **ends}


def _is_below(path: str, starts: Iterable[str]) -> bool:
    return any(path == start or path.startswith(f"{start}/") for start in starts)
