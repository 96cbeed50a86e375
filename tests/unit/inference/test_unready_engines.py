"""Engines that answer health checks, and fail to answer what a lane must know to serve."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from stand_in_answers import Speed
from stand_in_engine import StandInEngine, serving

from forgemq_bus.memory import MemoryLog
from forgemq_settings.ports import free_port
from forgemq_telemetry.causes import causes
from tests.lane_scene import LaneScene, create_topics

FAILED = web.HTTPInternalServerError(text="the scheduler is not there yet")


class StartingEngine(StandInEngine):
    """Fails to answer one path, with each of these in turn and then no more."""

    def __init__(self, path: str, failures: Iterator[web.HTTPException | None]) -> None:
        super().__init__(Speed(tokens=2))
        self._path, self._failures = path, failures

    def app(self) -> web.Application:
        @web.middleware
        async def failing(request: web.Request, handler: Any) -> web.StreamResponse:
            failure = next(self._failures, None) if request.path == self._path else None
            if failure is not None:
                return web.Response(status=failure.status, text=failure.text)
            return await handler(request)  # type: ignore[no-any-return]  # a handler's

        app = super().app()
        app.middlewares.append(failing)
        return app


async def scene_of(base: Path, url: str) -> LaneScene:
    log = MemoryLog(run="r")
    await create_topics(log)
    return LaneScene(log, model=base, engine_url=url)


@pytest.mark.parametrize("path", ["/server_info", "/model_info"])
async def test_an_engine_that_fails_to_answer_at_first_is_waited_for(base: Path, path: str) -> None:
    engine = StartingEngine(path, iter([FAILED, FAILED]))
    async with serving(engine) as url:
        scene = await scene_of(base, url)
        async with scene.serving():
            await scene.report(is_serving=True, timeout_s=5)
            await scene.request(1, [5, 6, 7], max_tokens=30)
            (record,) = await scene.finished(count=1, timeout_s=5)
    assert record.finish_reason == "stop"
    (told,) = scene.events_named("engine_not_ready")
    assert (told["url"], told["error"]) == (url, f"{path}: HTTP 500: {FAILED.text}")


async def test_an_engine_that_fails_to_answer_while_its_lane_serves_is_waited_for(
    base: Path,
) -> None:
    told: list[web.HTTPException | None] = [None] * 6
    engine = StartingEngine("/model_info", iter(told + [FAILED] * 5))
    async with serving(engine) as url:
        scene = await scene_of(base, url)
        async with scene.serving():
            await scene.report(is_serving=True, timeout_s=5)
            await scene.report(is_serving=False, timeout_s=5)
            await scene.report(is_serving=True, timeout_s=5)
    assert len(scene.events_named("engine_lost")) == 1
    assert len(scene.events_named("engine_not_ready")) == 1


@pytest.mark.slow
async def test_an_engine_that_fails_to_answer_until_the_deadline_ends_the_process(
    base: Path,
) -> None:
    engine = StartingEngine("/server_info", iter([FAILED] * 1000))
    async with serving(engine) as url:
        scene = await scene_of(base, url)
        with pytest.raises(ExceptionGroup) as raised:
            async with scene.serving(engine_start_timeout_s=1):
                await scene.report(is_serving=True, timeout_s=600)
    assert "answers health checks, and failed to answer for 1 s" in str(causes(raised.value))


async def test_a_server_that_is_no_engine_is_refused_at_once(base: Path) -> None:
    missing = web.HTTPNotFound(text="nothing here")
    engine = StartingEngine("/server_info", iter([missing] * 1000))
    async with serving(engine) as url:
        scene = await scene_of(base, url)
        with pytest.raises(ExceptionGroup) as raised:
            async with scene.serving():
                await scene.report(is_serving=True, timeout_s=5)
    assert "/server_info: HTTP 404: nothing here" in str(causes(raised.value))


async def test_the_last_report_of_a_lane_says_why_its_engine_is_refused(base: Path) -> None:
    missing = web.HTTPNotFound(text="nothing here")
    async with serving(StartingEngine("/server_info", iter([missing] * 1000))) as url:
        scene = await scene_of(base, url)
        with pytest.raises(ExceptionGroup):
            async with scene.serving():
                await scene.report(is_serving=True, timeout_s=5)
        assert (
            await scene.report(is_serving=False)
        ).detail == "/server_info: HTTP 404: nothing here"


async def test_a_lane_reports_that_no_engine_answers_until_one_serves(base: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    scene = await scene_of(base, url)
    async with scene.serving():
        async with asyncio.timeout(5):
            while not (told := (await scene.report(is_serving=False)).detail):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert told.startswith(f"{url} is not healthy: ")
        async with serving(StandInEngine(Speed(tokens=2)), port=port):
            assert (await scene.report(is_serving=True, timeout_s=5)).detail == ""


async def test_a_lane_that_ends_after_its_engine_says_nothing_of_a_failed_abort(base: Path) -> None:
    """As at the end of `forgemq run`, which stops both at the same time."""
    async with AsyncExitStack() as engine:
        url = await engine.enter_async_context(serving(StandInEngine(Speed(tokens=2))))
        scene = await scene_of(base, url)
        async with scene.serving():
            await scene.report(is_serving=True, timeout_s=5)
            await engine.aclose()
    assert scene.events_named("abort_failed") == []


async def test_a_lane_that_ends_says_that_its_engine_did_not_take_the_abort(base: Path) -> None:
    async with serving(StartingEngine("/abort_request", iter([None, FAILED]))) as url:
        scene = await scene_of(base, url)
        async with scene.serving():
            await scene.report(is_serving=True, timeout_s=5)
    (told,) = scene.events_named("abort_failed")
    assert told["error"] == f"/abort_request: HTTP 500: {FAILED.text}"
