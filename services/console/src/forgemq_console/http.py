"""The page and its data over HTTP, described at /api/openapi.json."""

import gzip
from collections.abc import Callable
from importlib import resources
from typing import Annotated, TypeAlias

import msgspec
from fastapi import FastAPI, Path, Query, Request, Response
from plotly.offline import get_plotlyjs

from forgemq_console.core import GroupView, bounded
from forgemq_console.group_reading import ReadGroup
from forgemq_console.openapi import EPISODE_PATTERN, GROUP_PATTERN, Groups, document, json_of, text
from forgemq_run_view.state import RunState
from forgemq_run_view.view import RunView

GROUP_ROWS_MAX = 300
"""What a person scrolls through; older groups are found by their address."""
ASSETS = (
    *("charts.js", "compare.js", "console.css", "console.js", "elements.js", "runs.js"),
    "trajectory.js",
)
"""What the pages load besides Plotly."""
_MEDIA_TYPES = {"css": "text/css", "html": "text/html", "js": "text/javascript"}
ONE_YEAR = "public, max-age=31536000, immutable"
"""Plotly's script changes with its version alone, and a browser need not ask for it again."""

GroupInPath: TypeAlias = Annotated[str, Path(pattern=GROUP_PATTERN, description="Id of a group.")]
EpisodeInQuery: TypeAlias = Annotated[
    str | None, Query(pattern=EPISODE_PATTERN, description="The one to send in full.")
]


def web(view: RunView, *, clock_ms: Callable[[], int], read_group: ReadGroup) -> FastAPI:
    """The console's HTTP application.

    Args:
        view: The live aggregate.
        clock_ms: Wall-clock time.
        read_group: A group's episodes, one of them in full.
    """
    # FastAPI's pages about the API load scripts from elsewhere, so only the description is served.
    app = FastAPI(title="ForgeMQ console", docs_url=None, redoc_url=None, openapi_url=None)
    _add_page(app)
    _add_data(app, view, clock_ms=clock_ms, read_group=read_group)

    @app.get("/api/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return as_json(document(app))

    return app


def _add_data(
    app: FastAPI, view: RunView, *, clock_ms: Callable[[], int], read_group: ReadGroup
) -> None:
    @app.get("/health", response_class=Response, responses={200: text("It answers.")})
    async def health() -> Response:
        """Say that the console answers."""
        return Response("ok\n", media_type="text/plain")

    @app.get("/api/state", response_class=Response, responses={200: json_of(RunState)})
    async def state() -> Response:
        """Give the live state of the run, each curve with at most 600 points."""
        return as_json(bounded(view.state(now_ms=shown_ms(view, clock_ms))))

    @app.get("/api/groups", response_class=Response, responses={200: json_of(Groups)})
    async def groups() -> Response:
        """List the 300 groups that records named last, newest first."""
        return as_json(view.rows(rows_max=GROUP_ROWS_MAX))

    @app.get(
        "/api/groups/{group_id}",
        response_class=Response,
        responses={200: json_of(GroupView), 404: text("No record named this group.")},
    )
    async def group(group_id: GroupInPath, episode: EpisodeInQuery = None) -> Response:
        """List the episodes of a group and give one in full: the one asked for, else the first."""
        if not view.knows(group_id):
            return Response("no such group\n", status_code=404, media_type="text/plain")
        return as_json(await read_group(group_id, episode))


def _add_page(app: FastAPI) -> None:
    plotly = gzip.compress(get_plotlyjs().encode(), compresslevel=6)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return asset("index.html")

    @app.get("/console.css", include_in_schema=False)
    async def style() -> Response:
        return asset("console.css")

    @app.get("/{name}.js", include_in_schema=False)
    async def script(name: str, request: Request) -> Response:
        if name == "plotly":
            return _plotly(plotly, request)
        if f"{name}.js" in ASSETS:
            return asset(f"{name}.js")
        return Response("no such script\n", status_code=404, media_type="text/plain")


def shown_ms(view: RunView, clock_ms: Callable[[], int]) -> int:
    """The moment that a page shows: now, or the end of a run that is over."""
    return view.end.ended_ms if view.end else clock_ms()


def as_json(value: object) -> Response:
    """An answer that no cache keeps."""
    return Response(
        msgspec.json.encode(value),
        media_type="application/json",
        headers={"Cache-Control": "no-store"},
    )


def asset(name: str) -> Response:
    """A file of the page."""
    media_type = _MEDIA_TYPES[name.rpartition(".")[2]]
    content = resources.files("forgemq_console").joinpath("page", name).read_bytes()
    headers = {
        "Cache-Control": "no-cache",
        # Nothing is ever loaded from elsewhere; inline styles are those of the charts.
        "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:",
    }
    return Response(content, media_type=media_type, headers=headers)


def _plotly(compressed: bytes, request: Request) -> Response:
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers = {"Content-Encoding": "gzip", "Cache-Control": ONE_YEAR}
        return Response(compressed, media_type="text/javascript", headers=headers)
    return Response(gzip.decompress(compressed), media_type="text/javascript")
