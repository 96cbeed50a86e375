"""A lane is drained, resumed and removed through the whole service, beside the stand-in engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from stand_in_answers import Speed
from stand_in_engine import StandInEngine, serving

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.lane_plan import LaneChange, RequestedLane
from forgemq_inference.core.weights import weights_of_name
from tests.lane_scene import LaneScene, create_topics

CONTEXT = [5, 6, 7]
SLOW = Speed(tokens=40, latency_s=1.5)


async def change(scene: LaneScene, kind: LaneChange, lane: int = 0) -> None:
    record = RequestedLane(lane=lane, change=kind, change_id="0" * 32, requested_ms=0)
    await scene.write(topics.REQUESTED_LANES, 0, record)


@asynccontextmanager
async def scene_of(
    base: Path, speed: Speed, *, before: tuple[LaneChange, ...] = (), drain_s: float = 0.2
) -> AsyncIterator[tuple[LaneScene, StandInEngine]]:
    engine = StandInEngine(speed)
    async with serving(engine) as url:
        log = MemoryLog(run="r")
        await create_topics(log)
        scene = LaneScene(log, model=base, engine_url=url)
        for kind in before:
            await change(scene, kind)
        async with scene.serving(drain_s=drain_s):
            yield scene, engine


async def test_a_drained_lane_finishes_what_it_has_and_keeps_its_weights_new(
    base: Path, trained: Path
):
    async with scene_of(base, SLOW) as (scene, engine):
        await scene.report(is_serving=True)
        await scene.request(1, CONTEXT)
        await scene.until_running()
        await change(scene, "drain")
        assert (await scene.report(is_serving=False)).running == 1
        await scene.request(2, CONTEXT)  # A gateway had sent it before it knew.
        records = await scene.finished(count=2)
        assert [(record.finish_reason, record.error) for record in records] == [("stop", "")] * 2
        await scene.publish(trained, version=1)
        *_, loaded = await scene.loaded(count=2)
        assert (loaded.version, weights_of_name(engine.weight_version)) == (1, (1, 1))
        assert not (await scene.report(is_serving=False)).is_serving
        await change(scene, "resume")
        report = await scene.report(is_serving=True)
        assert (report.epoch, report.version) == (1, 1)


async def test_a_lane_that_is_removed_ends_its_process_and_hands_over_what_is_left(base: Path):
    async with scene_of(base, SLOW) as (scene, _):
        await scene.report(is_serving=True)
        await scene.request(1, CONTEXT)
        await scene.until_running()
        await change(scene, "remove")
        (record,) = await scene.finished(count=1)
        assert (record.finish_reason, record.error) == ("error", "engine: the lane is leaving")
        await scene.report(is_serving=False)


async def test_a_lane_that_is_removed_finishes_what_ends_in_time(base: Path):
    async with scene_of(base, SLOW, drain_s=10.0) as (scene, _):
        await scene.report(is_serving=True)
        await scene.request(1, CONTEXT)
        await scene.until_running()
        await change(scene, "remove")
        (record,) = await scene.finished(count=1)
        assert (record.finish_reason, record.error) == ("stop", "")


async def test_a_process_of_a_drained_lane_waits_with_its_engine_ready(base: Path):
    async with scene_of(base, Speed(tokens=2), before=("drain",)) as (scene, _):
        await scene.loaded(count=1)
        await asyncio.sleep(0.3)  # Three heartbeats.
        assert not (await scene.report(is_serving=False)).is_serving
        assert [event["lane"] for event in scene.events_named("lane_waits")] == [0]
        await change(scene, "resume")
        await scene.report(is_serving=True)
