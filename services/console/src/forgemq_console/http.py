"""The page and its data over HTTP."""

import gzip
from collections.abc import Awaitable, Callable
from importlib import resources

import msgspec
from fastapi import FastAPI, Request, Response
from plotly.offline import get_plotlyjs

from forgemq_console.core import GroupView, bounded
from forgemq_run_view.view import RunView

GROUP_ROWS_MAX = 300
FOREVER = "public, max-age=31536000, immutable"

ReadGroup = Callable[[str, str | None], Awaitable[GroupView]]


def web(view: RunView, *, clock_ms: Callable[[], int], read_group: ReadGroup) -> FastAPI:
    """The console's HTTP application.

    Args:
        view: The live aggregate.
        clock_ms: Wall-clock time.
        read_group: A group's episodes, one of them in full.
    """
    app = FastAPI(title="ForgeMQ console", docs_url=None, redoc_url=None, openapi_url=None)
    _add_page(app)

    @app.get("/health")
    async def health() -> Response:
        return Response("ok\n", media_type="text/plain")

    @app.get("/api/state")
    async def state() -> Response:
        return _json(bounded(view.state(now_ms=clock_ms())))

    @app.get("/api/groups")
    async def groups() -> Response:
        return _json(view.rows(rows_max=GROUP_ROWS_MAX))

    @app.get("/api/groups/{group_id}")
    async def group(group_id: str, episode: str | None = None) -> Response:
        if not view.knows(group_id):
            return Response("no such group\n", status_code=404, media_type="text/plain")
        return _json(await read_group(group_id, episode))

    return app


def _add_page(app: FastAPI) -> None:
    plotly = gzip.compress(get_plotlyjs().encode(), compresslevel=6)

    @app.get("/")
    async def page() -> Response:
        return _asset("index.html", "text/html")

    @app.get("/console.css")
    async def style() -> Response:
        return _asset("console.css", "text/css")

    @app.get("/{name}.js")
    async def script(name: str, request: Request) -> Response:
        if name == "plotly":
            return _plotly(plotly, request)
        if name in ("console", "charts", "trajectory"):
            return _asset(f"{name}.js", "text/javascript")
        return Response("no such script\n", status_code=404, media_type="text/plain")


def _json(value: object) -> Response:
    return Response(
        msgspec.json.encode(value),
        media_type="application/json",
        headers={"Cache-Control": "no-store"},
    )


def _asset(name: str, media_type: str) -> Response:
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
        headers = {"Content-Encoding": "gzip", "Cache-Control": FOREVER}
        return Response(compressed, media_type="text/javascript", headers=headers)
    return Response(gzip.decompress(compressed), media_type="text/javascript")
