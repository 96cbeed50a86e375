"""The group, episode and lane APIs in FastAPI: the routes of the contract over operations."""

from collections.abc import Awaitable, Callable, MutableMapping
from functools import wraps
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.routing import APIRoute

from forgemq_bus.errors import FINAL_ERRORS, LogError
from forgemq_contracts import admin_routes, lane_routes, openapi
from forgemq_contracts.admin import (
    AbortRequest,
    Claim,
    ClaimRequest,
    DomainResults,
    FinishRequest,
    GroupQuery,
    GroupRequest,
    GroupStatus,
    Lease,
    Recorded,
    Released,
    ResultsQuery,
    RewardRequest,
    RunStatus,
)
from forgemq_contracts.admin_routes import Route
from forgemq_contracts.lane_routes import LaneAddition, LaneList, LaneStatus
from forgemq_gateway.access import Access
from forgemq_gateway.admin_input import body_of, query_of
from forgemq_gateway.connections import LEFT
from forgemq_gateway.core.errors import (
    MovedError,
    RefusedError,
    ending,
    log_refuses,
    unknown,
)
from forgemq_gateway.lane_operations import LaneOperations
from forgemq_gateway.operations import Operations
from forgemq_gateway.wire import (
    Application,
    ClientGoneError,
    Receive,
    Scope,
    Send,
    headers_of,
    refusal_body,
    send_refusal,
)

OPENAPI_PATH = "/openapi.json"
_MOVED = "forgemq.moved"

Served = TypeVar("Served", bound=Callable[..., Awaitable[msgspec.Struct | None]])


def admin_app(
    operations: Operations, lane_operations: LaneOperations, *, access: Access
) -> Application:
    """The API behind the admin key; its OpenAPI document is open to all.

    Plain ASGI: FastAPI's own middleware starts tasks and streams for every request.
    """
    api = admin_api(operations, lane_operations)

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != OPENAPI_PATH:
            try:
                access.check_admin(headers_of(scope))
            except RefusedError as error:
                await send_refusal(send, error)
                return
        await _serve_or_move(api, scope, receive, send)

    return checked


async def _serve_or_move(api: FastAPI, scope: Scope, receive: Receive, send: Send) -> None:
    """Let FastAPI answer.

    Raises:
        MovedError: the group moved, also while the request waited; nothing was sent. FastAPI
            answers every error by itself, so that one is noted in the scope and its answer dropped.
    """
    moved: list[MovedError] = []
    parts: list[bytes] = []

    async def receive_noted() -> MutableMapping[str, Any]:
        message = await receive()
        if message["type"] == "http.request":
            parts.append(message.get("body", b""))
        return message

    async def send_unless_moved(message: MutableMapping[str, Any]) -> None:
        if not moved:
            await send(message)

    await api({**scope, _MOVED: moved}, receive_noted, send_unless_moved)
    if moved:
        moved[0].body = b"".join(parts) if parts else None
        raise moved[0]


def admin_api(operations: Operations, lane_operations: LaneOperations) -> FastAPI:
    """All routes of the contract, without a check of keys.

    FastAPI's generated document is off: it knows no msgspec structs. The contract's is served.
    """
    app = FastAPI(title="ForgeMQ gateway", docs_url=None, redoc_url=None, openapi_url=None)
    _add_refusals(app)
    _add_groups(app, operations)
    _add_episodes(app, operations)
    _add_lanes(app, lane_operations)

    @app.get(OPENAPI_PATH)
    async def read_document() -> Response:
        return Response(openapi.text(), media_type="application/json")

    return app


def _add_groups(app: FastAPI, operations: Operations) -> None:
    @_serve(app, admin_routes.REQUEST_GROUP)
    async def request_group(
        asked: Annotated[GroupRequest, Depends(body_of(GroupRequest))],
    ) -> GroupStatus:
        return await operations.request_group(asked)

    @_serve(app, admin_routes.READ_GROUP)
    async def read_group(
        group_id: str, asked: Annotated[GroupQuery, Depends(query_of(GroupQuery))]
    ) -> GroupStatus:
        if asked.wait_s == 0:
            return operations.group(group_id)
        return await operations.changed_group(group_id, wait_s=asked.wait_s, known=asked.state)

    @_serve(app, admin_routes.CLAIM_EPISODE)
    async def claim_episode(
        group_id: str,
        asked: Annotated[ClaimRequest, Depends(body_of(ClaimRequest))],
        request: Request,
    ) -> Claim | None:
        has_left = request.scope[LEFT].done
        return await operations.claim(group_id, wait_s=asked.wait_s, has_left=has_left)

    @_serve(app, admin_routes.READ_RUN)
    async def read_run() -> RunStatus:
        return operations.run()

    @_serve(app, admin_routes.READ_RESULTS)
    async def read_results(
        domain: str, asked: Annotated[ResultsQuery, Depends(query_of(ResultsQuery))]
    ) -> DomainResults:
        return operations.results(domain, after=asked.after)


def _add_episodes(app: FastAPI, operations: Operations) -> None:
    @_serve(app, admin_routes.RENEW_LEASE)
    async def renew_lease(episode_id: str) -> Lease:
        return operations.renew_lease(episode_id)

    @_serve(app, admin_routes.RELEASE_EPISODE)
    async def release_episode(episode_id: str) -> Released:
        operations.openings.release(episode_id)
        return Released()

    @_serve(app, admin_routes.REPORT_REWARD)
    async def report_reward(
        episode_id: str, asked: Annotated[RewardRequest, Depends(body_of(RewardRequest))]
    ) -> Recorded:
        await operations.reward(episode_id, asked)
        return Recorded()

    @_serve(app, admin_routes.FINISH_EPISODE)
    async def finish_episode(
        episode_id: str, asked: Annotated[FinishRequest, Depends(body_of(FinishRequest))]
    ) -> Recorded:
        await operations.finish(episode_id, asked)
        return Recorded()

    @_serve(app, admin_routes.ABORT_EPISODE)
    async def abort_episode(
        episode_id: str, asked: Annotated[AbortRequest, Depends(body_of(AbortRequest))]
    ) -> Recorded:
        await operations.abort(episode_id, asked)
        return Recorded()


def _add_lanes(app: FastAPI, operations: LaneOperations) -> None:
    @_serve(app, lane_routes.LIST_LANES)
    async def list_lanes() -> LaneList:
        return operations.all_lanes()

    @_serve(app, lane_routes.ADD_LANE)
    async def add_lane(
        asked: Annotated[LaneAddition, Depends(body_of(LaneAddition))],
    ) -> LaneStatus:
        return await operations.add(asked)

    @_serve(app, lane_routes.DRAIN_LANE)
    async def drain_lane(lane: str) -> LaneStatus:
        return await operations.drain(lane)

    @_serve(app, lane_routes.RESUME_LANE)
    async def resume_lane(lane: str) -> LaneStatus:
        return await operations.resume(lane)

    @_serve(app, lane_routes.REMOVE_LANE)
    async def remove_lane(lane: str) -> LaneList:
        return await operations.remove(lane)


def _serve(app: FastAPI, route: Route) -> Callable[[Served], Served]:
    """Register a function under a route of the contract; its struct is the answer, None a 204."""

    def register(serve: Served) -> Served:
        @wraps(serve)  # FastAPI reads the parameters of the function within.
        async def answer(**values: object) -> Response:
            answered = await serve(**values)
            return Response(status_code=204) if answered is None else _json(answered)

        app.add_api_route(
            route.path, answer, methods=[route.method], name=route.name, response_model=None
        )
        return serve

    return register


def _add_refusals(app: FastAPI) -> None:
    """Give every refusal the one shape of an error, FastAPI's own included."""

    @app.exception_handler(RefusedError)
    async def refused(_: Request, error: RefusedError) -> Response:
        return _refusal(error)

    @app.exception_handler(MovedError)
    async def moved(request: Request, error: MovedError) -> Response:
        request.scope[_MOVED].append(error)
        return _refusal(error)

    @app.exception_handler(LogError)
    async def not_written(_: Request, error: LogError) -> Response:
        return _refusal(log_refuses(error))

    async def ended(_: Request, __: Exception) -> Response:
        return _refusal(ending())

    for final in FINAL_ERRORS:
        app.add_exception_handler(final, ended)

    @app.exception_handler(404)
    async def no_path(request: Request, _: Exception) -> Response:
        return _refusal(unknown(f"there is no {request.method} {request.url.path}"))

    @app.exception_handler(405)
    async def no_method(request: Request, _: HTTPException) -> Response:
        message = f"{request.url.path} takes no {request.method}"
        refused = _refusal(RefusedError(message, status=405, kind="invalid_request_error"))
        refused.headers["allow"] = ", ".join(_methods(app, request.scope["route"].path))
        return refused

    @app.exception_handler(ClientGoneError)
    async def gone(_: Request, __: ClientGoneError) -> Response:
        return Response(status_code=499)  # As nginx counts it; nobody is there to read it.


def _methods(app: FastAPI, path: str) -> list[str]:
    """Every method that a path takes; Starlette names those of its first route alone."""
    routes = (route for route in app.routes if isinstance(route, APIRoute) and route.path == path)
    return sorted({method for route in routes for method in route.methods or ()})


def _json(value: object, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def _refusal(error: RefusedError) -> Response:
    response = _json(refusal_body(error), status=error.status)
    if error.retry_after_s is not None:
        response.headers["retry-after"] = str(error.retry_after_s)
    return response
