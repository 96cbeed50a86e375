"""The description of the console's HTTP data, made from the structs that are sent.

FastAPI writes paths and parameters and checks the parameters; bodies are msgspec structs, so their
schemas come from msgspec.
"""

import typing
from typing import Any, TypeAlias

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from forgemq_console.core import ComparedRun, GroupView, RunRow
from forgemq_contracts.fields import EpisodeId, GroupId
from forgemq_contracts.run import RunId
from forgemq_run_view.state import GroupRow, RunState

Groups: TypeAlias = tuple[GroupRow, ...]
Runs: TypeAlias = tuple[RunRow, ...]
Answer: TypeAlias = dict[str, Any]

_SENT = (RunState, Groups, GroupView, Runs, ComparedRun)
_REFERENCE = "#/components/schemas/{name}"


def _pattern(of: object) -> str:
    (meta,) = (each for each in typing.get_args(of) if isinstance(each, msgspec.Meta))
    assert meta.pattern is not None
    return meta.pattern


GROUP_PATTERN = _pattern(GroupId)
EPISODE_PATTERN = _pattern(EpisodeId)
RUN_PATTERN = _pattern(RunId)


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI description of the application, every schema included."""
    described = get_openapi(
        title=app.title, version="1", routes=app.routes, description="What a run looks like, live."
    )
    _, schemas = msgspec.json.schema_components(_SENT, ref_template=_REFERENCE)
    described.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
    return described


def json_of(kind: object) -> Answer:
    """An answer whose body is this struct, or several, as JSON."""
    (schema,), _ = msgspec.json.schema_components((kind,), ref_template=_REFERENCE)
    name = schema.get("$ref", "").rpartition("/")[2] or "List"
    return {"description": name, "content": {"application/json": {"schema": schema}}}


def text(description: str) -> Answer:
    """An answer of one line of text."""
    return {"description": description, "content": {"text/plain": {"schema": {"type": "string"}}}}
