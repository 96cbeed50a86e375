"""The list of runs, the page of each, and two of them side by side."""

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeAlias

from fastapi import FastAPI, Path, Response
from fastapi.responses import RedirectResponse

from forgemq_bus.errors import AccessError, LogError
from forgemq_console.core import ComparedRun, GroupView, bounded
from forgemq_console.http import (
    ASSETS,
    GROUP_ROWS_MAX,
    EpisodeInQuery,
    GroupInPath,
    as_json,
    asset,
    shown_ms,
)
from forgemq_console.openapi import RUN_PATTERN, Answer, Groups, Runs, json_of, text
from forgemq_console.other_runs import OtherRuns, UnknownRunError
from forgemq_run_view.state import RunState

RunInPath: TypeAlias = Annotated[str, Path(pattern=RUN_PATTERN, description="Id of a run.")]

_REFUSALS: dict[int | str, Answer] = {
    403: text("The broker does not let this console read the run."),
    404: text("The run, or the group, is not on the broker."),
    503: text("The broker does not answer."),
}


def add_runs(app: FastAPI, runs: OtherRuns, *, clock_ms: Callable[[], int]) -> None:
    """Serve the runs of the broker beside the console's own."""
    _add_pages(app)
    _add_list(app, runs, clock_ms=clock_ms)
    _add_run(app, runs, clock_ms=clock_ms)


def _add_pages(app: FastAPI) -> None:
    @app.get("/runs", include_in_schema=False)
    async def to_runs() -> Response:
        return RedirectResponse("runs/")

    @app.get("/runs/", include_in_schema=False)
    async def list_page() -> Response:
        return asset("runs.html")

    @app.get("/compare/", include_in_schema=False)
    async def compare_page() -> Response:
        return asset("compare.html")

    @app.get("/runs/{run}/", include_in_schema=False)
    async def run_page(run: RunInPath) -> Response:
        del run  # The page asks for the data of its own address.
        return asset("index.html")

    @app.get("/runs/{run}/{name}", include_in_schema=False)
    async def run_asset(run: RunInPath, name: str) -> Response:
        del run
        if name == "plotly.js":
            return RedirectResponse("../../plotly.js")
        if name not in ASSETS:
            return Response("no such file\n", status_code=404, media_type="text/plain")
        return asset(name)


def _add_list(app: FastAPI, runs: OtherRuns, *, clock_ms: Callable[[], int]) -> None:
    @app.get("/api/runs", response_class=Response, responses={200: json_of(Runs), **_REFUSALS})
    async def rows() -> Response:
        """List the runs whose records are on the broker, the newest first."""
        return await _answer(runs.rows())

    @app.get(
        "/api/runs/{run}/compared",
        response_class=Response,
        responses={200: json_of(ComparedRun), **_REFUSALS},
    )
    async def compared(run: RunInPath) -> Response:
        """Give the curves and the report of a run; groups that wait for an auditor are not in."""

        async def made() -> ComparedRun:
            async with runs.opened(run) as opened:
                return await opened.compared(now_ms=clock_ms())

        return await _answer(made())


def _add_run(app: FastAPI, runs: OtherRuns, *, clock_ms: Callable[[], int]) -> None:
    @app.get(
        "/runs/{run}/api/state",
        response_class=Response,
        responses={200: json_of(RunState), **_REFUSALS},
    )
    async def state(run: RunInPath) -> Response:
        """Give the state of a run of this broker, as /api/state does of the console's own."""

        async def made() -> RunState:
            async with runs.opened(run) as opened:
                view = opened.view
                return bounded(view.state(now_ms=shown_ms(view, clock_ms)))

        return await _answer(made())

    @app.get(
        "/runs/{run}/api/groups",
        response_class=Response,
        responses={200: json_of(Groups), **_REFUSALS},
    )
    async def groups(run: RunInPath) -> Response:
        """List its 300 groups that records named last, newest first."""

        async def made() -> Groups:
            async with runs.opened(run) as opened:
                return opened.view.rows(rows_max=GROUP_ROWS_MAX)

        return await _answer(made())

    @app.get(
        "/runs/{run}/api/groups/{group_id}",
        response_class=Response,
        responses={200: json_of(GroupView), **_REFUSALS},
    )
    async def group(
        run: RunInPath, group_id: GroupInPath, episode: EpisodeInQuery = None
    ) -> Response:
        """List the episodes of one of its groups and give one in full."""

        async def made() -> GroupView:
            async with runs.opened(run) as opened:
                if not opened.view.knows(group_id):
                    raise UnknownRunError(f"run {run} has no group {group_id}")
                return await opened.read_group(group_id, episode)

        return await _answer(made())


async def _answer(work: Awaitable[object]) -> Response:
    """What `work` returns, as JSON, or why there is none."""
    try:
        return as_json(await work)
    except UnknownRunError as error:
        status, reason = 404, str(error)
    except AccessError as error:
        status, reason = 403, str(error)
    except LogError as error:
        status, reason = 503, str(error)
    return Response(f"{reason}\n", status_code=status, media_type="text/plain")
