"""The gateway in memory behind real HTTP: every route of the contract, and its refusals."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web
from aiohttp.test_utils import TestServer
from msgspec import Struct

from forgemq_contracts import admin_routes
from forgemq_contracts.admin import BODY_BYTES_MAX, ErrorBody, ErrorType, Refusal
from forgemq_contracts.admin_routes import Route
from tests.memory_gateway import COMPLETION_ID, MemoryGateway, RefusedError

ADMIN_KEY = "admin"
TYPE_OF_STATUS: dict[int, ErrorType] = {
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    410: "gone_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}

Answer = Callable[[web.Request], Awaitable[web.Response]]


def refused(
    status: int, message: str, *, param: str | None = None, code: str | None = None, **headers: str
) -> web.Response:
    """A refusal in the gateway's shape; `Retry_After="3"` is a header."""
    kind = TYPE_OF_STATUS.get(status, "invalid_request_error")
    body = Refusal(error=ErrorBody(message=message, type=kind, param=param, code=code))
    return web.Response(
        status=status,
        body=msgspec.json.encode(body),
        content_type="application/json",
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )


@asynccontextmanager
async def served(gateway: MemoryGateway) -> AsyncIterator[MemoryGateway]:
    """Serve the gateway on a free port; its address is in `url`."""
    server = TestServer(app_of(gateway))
    await server.start_server()
    gateway.url = str(server.make_url("")).rstrip("/")
    yield gateway
    await server.close()


def app_of(gateway: MemoryGateway) -> web.Application:
    """The API over this gateway; several such applications share its state."""
    app = web.Application(client_max_size=BODY_BYTES_MAX)
    for route in admin_routes.ALL:
        app.router.add_route(route.method, route.path, _serve(gateway, route))
    app.router.add_post("/v1/chat/completions", _serve_chat(gateway))
    return app


def _serve(gateway: MemoryGateway, route: Route) -> Answer:
    async def answer(request: web.Request) -> web.Response:
        gateway.requests.append(route.name)
        if route is admin_routes.REQUEST_GROUP and gateway.answers:
            return gateway.answers.pop(0)
        try:
            answered = await _call(gateway, route, request)
        except RefusedError as error:
            return _refused(error)
        if answered is None:
            return web.Response(status=204)
        body = msgspec.json.encode(answered)
        return web.Response(body=body, content_type="application/json")

    return answer


async def _call(gateway: MemoryGateway, route: Route, request: web.Request) -> Struct | None:
    if request.headers.get("Authorization") != f"Bearer {ADMIN_KEY}":
        raise RefusedError(401, "the admin key is missing or wrong")
    inputs = await _inputs(route, request)
    gateway.lapse_due()
    # The gateway has one method for each route, of the same name.
    answer: Struct | None = await getattr(gateway, route.name)(
        *request.match_info.values(), *inputs
    )
    return answer


def _serve_chat(gateway: MemoryGateway) -> Answer:
    """A chat completion that says only whose key it got."""

    async def answer(request: web.Request) -> web.Response:
        gateway.chats.append(await request.read())
        if gateway.answers:
            return gateway.answers.pop(0)
        key = request.headers["Authorization"].removeprefix("Bearer ")
        try:
            attempt = gateway.open_attempt(key.removeprefix("key-"))
        except RefusedError as error:
            return _refused(error)
        gateway.renew(attempt)
        attempt.completions.add(COMPLETION_ID)
        message = {"role": "assistant", "content": f"{key} speaking"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({"id": f"chatcmpl-{COMPLETION_ID}", "choices": [choice]})

    return answer


async def _inputs(route: Route, request: web.Request) -> list[Struct]:
    """Query and body of the request, as the route declares them."""
    try:
        if route.query is not None:
            return [msgspec.convert(dict(request.query), route.query, strict=False)]
        if route.body is not None:
            body = await request.read() or b"{}"
            body.decode()
            return [msgspec.json.decode(body, type=route.body)]
    except web.HTTPRequestEntityTooLarge as error:
        raise RefusedError(413, "the body is too long") from error
    except msgspec.ValidationError as error:
        raise RefusedError(400, str(error), param=_param(error, route)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusedError(400, f"the body is not valid JSON: {error}") from error
    return []


def _param(error: msgspec.ValidationError, route: Route) -> str | None:
    """The field that the decoder names, in quotes or as a path."""
    kinds = [kind for kind in (route.body, route.query) if kind is not None]
    names = [name for kind in kinds for name in kind.__struct_fields__]
    return next((n for n in names if f"`{n}`" in str(error) or f"$.{n}" in str(error)), None)


def _refused(error: RefusedError) -> web.Response:
    after = error.retry_after_s
    headers = {} if after is None else {"Retry_After": str(after)}
    return refused(error.status, error.message, param=error.param, **headers)
