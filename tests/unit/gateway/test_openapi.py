"""The gateway serves the document of its API, and the API that the document describes."""

from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import openapi
from forgemq_gateway.admin_route import OPENAPI_PATH, admin_api
from tests.unit.gateway.scripted_lane import wall_ms
from tests.unit.gateway.world import configuration_of, plain_http, running

COMMITTED = Path(__file__).parents[3] / "contracts" / "openapi.json"
GROUP: dict[str, Any] = {"domain": "shop", "idempotency_key": "k", "task": {}}


def test_the_routes_are_those_of_the_document() -> None:
    app = admin_api(object(), object())  # No request comes, so no operation is called.
    served = {
        (route.path, method.lower())
        for route in app.routes
        if isinstance(route, APIRoute) and route.path != OPENAPI_PATH
        for method in route.methods
    }
    documented = {
        (path, method)
        for path, methods in openapi.document()["paths"].items()
        for method in methods
    }
    assert served == documented
    assert len(app.routes) == len(documented) + 1


async def test_the_committed_document_is_served_to_all(model: Path) -> None:
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with (
        running(log, configuration_of(model), lambda _: "yes") as (world, _),
        plain_http() as client,
    ):
        answer = await client.get(f"{world.base_url}{OPENAPI_PATH}")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.content == COMMITTED.read_bytes()


@pytest.mark.parametrize(
    ("method", "path", "message", "allowed"),
    [
        ("GET", "/v1/nothing", "there is no GET /v1/nothing", None),
        ("DELETE", "/v1/groups", "/v1/groups takes no DELETE", "POST"),
        ("DELETE", "/v1/lanes", "/v1/lanes takes no DELETE", "GET, POST"),
        ("GET", "/v1/lanes/0/drain", "/v1/lanes/0/drain takes no GET", "POST"),
    ],
)
async def test_what_is_not_served_is_refused_in_the_same_shape(
    model: Path, method: str, path: str, message: str, allowed: str | None
) -> None:
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configuration_of(model), lambda _: "yes") as (world, _):
        answer = await world.admin(method, path)
    assert answer.status_code == (405 if allowed else 404)
    assert answer.json()["error"]["message"] == message
    assert answer.headers.get("allow") == allowed


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        (
            {"purpose": "fun"},
            "purpose",
            "Invalid enum value 'fun' - at `$.purpose`; must be one of eval, train",
        ),
        ({"group_size": 0}, "group_size", "Expected `int` >= 1 - at `$.group_size`"),
        ({"temperature": 11}, "temperature", "Expected `float` <= 10.0 - at `$.temperature`"),
    ],
)
async def test_a_refused_field_is_named_with_its_rule(
    model: Path, change: dict[str, Any], param: str, message: str
) -> None:
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configuration_of(model), lambda _: "yes") as (world, _):
        answer = await world.admin("POST", "/v1/groups", GROUP | change)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["message"]) == (param, message)


async def test_a_body_over_the_limit_is_413(model: Path) -> None:
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configuration_of(model), lambda _: "yes") as (world, _):
        answer = await world.admin("POST", "/v1/groups", {**GROUP, "task": "x" * 2**24})
    assert answer.status_code == 413
    assert "16777216 bytes" in answer.json()["error"]["message"]
