"""The OpenAPI 3.1 document of the group, episode and lane APIs, from their routes and structs."""

import json
import re
from typing import Any

import msgspec
from msgspec import Struct

from forgemq_contracts import admin_routes, lane_routes
from forgemq_contracts.admin import Refusal
from forgemq_contracts.admin_routes import RETRIED, Route

VERSION = "1.0.0"
ROUTES = (*admin_routes.ALL, *lane_routes.ALL)

_RETRY_AFTER = {
    "description": "Ask again after this many seconds.",
    "schema": {"type": "integer", "minimum": 0},
}
_REFERENCE = "#/components/schemas/{name}"
_DESCRIPTION = (
    "Agents ask for groups of episodes, claim episodes, and report how they ended. Every route "
    "needs the admin key as a bearer token. Between claim and end an agent samples by OpenAI's "
    "chat completions, under the base URL and with the key of the claim. People add, drain and "
    "remove the engines of the run while it is up."
)


def text() -> str:
    """The document as JSON: the content of `openapi.json`, and what the gateway serves."""
    return json.dumps(document(), indent=1, ensure_ascii=True) + "\n"


def document() -> dict[str, Any]:
    """The whole document as plain values."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "ForgeMQ gateway", "version": VERSION, "description": _DESCRIPTION},
        "security": [{"admin_key": []}],
        "paths": _paths(),
        "components": {
            "securitySchemes": {"admin_key": {"type": "http", "scheme": "bearer"}},
            "schemas": _schemas(),
        },
    }


def _paths() -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return paths


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {"operationId": route.name, "summary": route.summary}
    if parameters := _path_parameters(route) + _query_parameters(route):
        operation["parameters"] = parameters
    if route.body is not None:
        schema = msgspec.json.schema_components([route.body])[1][route.body.__name__]
        # A body may be left out if every field has a default.
        operation["requestBody"] = {
            "required": bool(schema["required"]),
            "content": _content(route.body),
        }
    return {**operation, "responses": _responses(route)}


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": msgspec.json.schema(admin_routes.PATH_FIELDS[name]),
        }
        for name in re.findall(r"\{(\w+)\}", route.path)
    ]


def _query_parameters(route: Route) -> list[dict[str, Any]]:
    if route.query is None:
        return []
    schema = msgspec.json.schema_components([route.query])[1][route.query.__name__]
    return [
        {"name": name, "in": "query", "required": name in schema["required"], "schema": field}
        for name, field in schema["properties"].items()
    ]


def _responses(route: Route) -> dict[str, Any]:
    answer = (route.answer.__doc__ or "").splitlines()[0]
    responses: dict[str, Any] = {"200": {"description": answer, "content": _content(route.answer)}}
    if route.nothing:
        responses["204"] = {"description": route.nothing}
    for status, reason in route.all_refusals.items():
        response: dict[str, Any] = {"description": reason, "content": _content(Refusal)}
        if status in RETRIED:
            response["headers"] = {"Retry-After": _RETRY_AFTER}
        responses[str(status)] = response
    return responses


def _content(kind: type[Struct]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REFERENCE.format(name=kind.__name__)}}}


def _schemas() -> dict[str, Any]:
    kinds: list[type[Struct]] = [Refusal]
    for route in ROUTES:
        kinds += [kind for kind in (route.body, route.answer) if kind is not None]
    _, components = msgspec.json.schema_components(set(kinds), ref_template=_REFERENCE)
    return dict(sorted(components.items()))
