"""What a lane tells of a live request while the engine samples it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from stand_in_answers import Speed, sampled
from stand_in_engine import StandInEngine, serving

from forgemq_bus.errors import LogUnavailableError
from forgemq_bus.log import Emit
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.arrays import unpack_ids
from forgemq_contracts.completions import SampledChunk
from forgemq_inference.engine import Engine, EngineRefusedError
from tests.lane_scene import GROUP, LaneScene, create_topics, request_id
from tests.unit.gateway.hindered_log import HinderedLog

CONTEXT = [5, 6, 7]


async def scene_of(base: Path, url: str) -> LaneScene:
    log = MemoryLog(run="r")
    await create_topics(log)
    return LaneScene(log, model=base, engine_url=url)


async def chunks(scene: LaneScene) -> list[Any]:
    places = [await scene.read(topics.SAMPLED_CHUNKS.name, number) for number in range(4)]
    return [topics.decode(topics.SAMPLED_CHUNKS, r.value) for place in places for r in place]


async def test_a_live_request_is_told_in_chunks_that_join_to_its_record(base: Path) -> None:
    speed = Speed(tokens=40, latency_s=0.8, slices=20)
    async with serving(StandInEngine(speed)) as url:
        scene = await scene_of(base, url)
        async with scene.serving():
            await scene.report(is_serving=True)
            await scene.request(1, CONTEXT, is_live=True, max_tokens=50)
            (record,) = await scene.finished(count=1)
        told = await chunks(scene)
    tokens, _ = sampled(CONTEXT, count=40, speed=speed)
    joined = [token for chunk in told for token in unpack_ids(chunk.tokens)]
    assert unpack_ids(record.output) == tokens
    assert len(told) > 2
    assert joined == tokens[: len(joined)]
    assert [chunk.start for chunk in told] == [0, *ends(told)[:-1]]
    assert {(c.request_id, c.attempt, c.group_id) for c in told} == {(request_id(1), 0, GROUP)}


def ends(told: list[SampledChunk]) -> list[int]:
    return [chunk.start + len(chunk.tokens) // 4 for chunk in told]


async def test_the_chunk_after_one_that_the_log_did_not_take_has_the_tokens_of_both(
    base: Path,
) -> None:
    lost: list[Emit] = []

    async def lose_the_second(emit: Emit) -> None:
        if emit.topic == topics.SAMPLED_CHUNKS.name:
            lost.append(emit)
            if len(lost) == 2:
                raise LogUnavailableError("no answer in time")

    async with serving(StandInEngine(Speed(tokens=40, latency_s=0.8, slices=20))) as url:
        log = MemoryLog(run="r")
        await create_topics(log)
        scene = LaneScene(HinderedLog(log, lose_the_second), model=base, engine_url=url)
        async with scene.serving():
            await scene.report(is_serving=True)
            await scene.request(1, CONTEXT, is_live=True, max_tokens=50)
            (record,) = await scene.finished(count=1)
        told = await chunks(scene)
    joined = [token for chunk in told for token in unpack_ids(chunk.tokens)]
    assert len(lost) > 3
    assert len(told) == len(lost) - 1
    assert joined == unpack_ids(record.output)[: len(joined)]


async def test_a_request_that_is_not_live_is_told_by_its_record_alone(base: Path) -> None:
    async with serving(StandInEngine(Speed(tokens=8, latency_s=0.3))) as url:
        scene = await scene_of(base, url)
        async with scene.serving():
            await scene.report(is_serving=True)
            await scene.request(1, CONTEXT)
            await scene.finished(count=1)
        assert await chunks(scene) == []


class Ears:
    """Hears everything."""

    def __init__(self) -> None:
        self.heard: list[list[int]] = []

    def is_due(self) -> bool:
        return True

    def tell(self, output_ids: list[int], /) -> None:
        self.heard.append(output_ids)


async def test_an_error_in_the_stream_is_a_refusal_with_its_message() -> None:
    error = b'{"error": {"message": "Failed to compile", "code": 400}}'
    parts = [b'data: {"output_ids": [1]}\n', b'\ndata: {"outp', b'ut_ids": [1, 2]}\n\n']
    parts += [b"data: " + error + b"\n\ndata: [DONE]\n\n"]

    async def generate(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(http)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0.01)
        return response

    app = web.Application()
    app.router.add_post("/generate", generate)
    ears = Ears()
    async with TestServer(app) as server, Engine(str(server.make_url(""))) as engine:
        with pytest.raises(EngineRefusedError, match="Failed to compile"):
            await engine.generate({"stream": True}, timeout_s=5, listener=ears)
    assert ears.heard == [[1], [1, 2]]


async def test_an_engine_that_dies_in_a_stream_is_an_engine_failure(base: Path) -> None:
    server = serving(StandInEngine(Speed(tokens=20, latency_s=5.0)))
    url = await server.__aenter__()
    scene = await scene_of(base, url)
    async with scene.serving():
        await scene.report(is_serving=True)
        await scene.request(1, CONTEXT, is_live=True, max_tokens=50)
        async with asyncio.timeout(10):
            while not await chunks(scene):  # noqa: ASYNC110 - the log tells nobody
                await asyncio.sleep(0.05)
        await server.__aexit__(None, None, None)
        (record,) = await scene.finished(count=1)
    assert (record.finish_reason, record.failure) == ("error", "engine")
