"""The admin API in FastAPI: groups, claims, leases, rewards, ends, and the run."""

from typing import Any, TypeVar, get_args

import msgspec
from fastapi import FastAPI, Request, Response

from forgemq_gateway.access import Access
from forgemq_gateway.admin_bodies import (
    AbortRequest,
    ClaimRequest,
    FinishRequest,
    GroupRequest,
    RewardRequest,
)
from forgemq_gateway.core.errors import RefusedError, field_of, invalid
from forgemq_gateway.core.registry import GroupState
from forgemq_gateway.operations import Operations
from forgemq_gateway.wire import (
    Application,
    Receive,
    Scope,
    Send,
    headers_of,
    refusal_body,
    send_refusal,
)

Body = TypeVar("Body", bound=msgspec.Struct)

_BODY_BYTES_MAX = 16 * 1024 * 1024


def admin_app(operations: Operations, *, access: Access) -> Application:
    """The application of the admin API; every route needs the admin key."""
    app = FastAPI(title="ForgeMQ gateway", docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(RefusedError)
    async def refused(_: Request, error: RefusedError) -> Response:
        return _refusal(error)

    _add_groups(app, operations)
    _add_episodes(app, operations)

    @app.get("/v1/run")
    async def run() -> Response:
        return _json(operations.run())

    return _for_admins(app, access=access)


def _for_admins(app: FastAPI, *, access: Access) -> Application:
    """The application behind the admin key.

    Plain ASGI: FastAPI's own middleware starts tasks and streams for every request.
    """

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                access.check_admin(headers_of(scope))
            except RefusedError as error:
                await send_refusal(send, error)
                return
        await app(scope, receive, send)

    return checked


def _add_groups(app: FastAPI, operations: Operations) -> None:
    @app.post("/v1/groups")
    async def request_group(request: Request) -> Response:
        return _json(await operations.request_group(await _body(request, GroupRequest)))

    @app.get("/v1/groups/{group_id}")
    async def group(group_id: str, request: Request) -> Response:
        wait_s = _wait_s(request)
        if wait_s == 0:
            return _json(operations.group(group_id))
        known = _known_state(request)
        return _json(await operations.changed_group(group_id, wait_s=wait_s, known=known))

    @app.post("/v1/groups/{group_id}/claim")
    async def claim(group_id: str, request: Request) -> Response:
        asked = await _body(request, ClaimRequest)
        claimed = await operations.claim(group_id, wait_s=asked.wait_s)
        return Response(status_code=204) if claimed is None else _json(claimed)


def _add_episodes(app: FastAPI, operations: Operations) -> None:
    @app.post("/v1/episodes/{episode_id}/heartbeat")
    async def heartbeat(episode_id: str) -> Response:
        return _json({"lease_s": operations.heartbeat(episode_id)})

    @app.post("/v1/episodes/{episode_id}/rewards")
    async def reward(episode_id: str, request: Request) -> Response:
        await operations.reward(episode_id, await _body(request, RewardRequest))
        return _json({})

    @app.post("/v1/episodes/{episode_id}/finish")
    async def finish(episode_id: str, request: Request) -> Response:
        await operations.finish(episode_id, await _body(request, FinishRequest))
        return _json({})

    @app.post("/v1/episodes/{episode_id}/abort")
    async def abort(episode_id: str, request: Request) -> Response:
        await operations.abort(episode_id, await _body(request, AbortRequest))
        return _json({})


async def _body(request: Request, kind: type[Body]) -> Body:
    """The request's body as this struct.

    Raises:
        RefusedError: 400, naming the field; 413.
    """
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > _BODY_BYTES_MAX:
            raise RefusedError("the body is too long", status=413, kind="invalid_request_error")
    try:
        data.decode()  # Task and result are kept as they came, so nothing else decodes them.
        return msgspec.json.decode(data or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise invalid(str(error), param=field_of(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is not valid JSON: {error}", param=None) from error


def _wait_s(request: Request) -> float:
    text = request.query_params.get("wait_s", "0")
    try:
        return max(0.0, float(text))
    except ValueError as error:
        raise invalid(f"wait_s must be a number, got {text!r}", param="wait_s") from error


def _known_state(request: Request) -> GroupState | None:
    text = request.query_params.get("state")
    try:
        return None if text is None else msgspec.convert(text, GroupState)
    except msgspec.ValidationError as error:
        states = ", ".join(get_args(GroupState))
        raise invalid(f"state must be one of {states}, got {text!r}", param="state") from error


def _json(value: Any, *, status: int = 200) -> Response:  # noqa: ANN401 - a struct or a dict
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def _refusal(error: RefusedError) -> Response:
    response = _json(refusal_body(error), status=error.status)
    if error.retry_after_s is not None:
        response.headers["retry-after"] = str(error.retry_after_s)
    return response
