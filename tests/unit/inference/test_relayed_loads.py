"""Weights that the relay brings into the stand-in engine, through the whole service."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.weights import PublishedWeights, RelayedLane
from forgemq_settings.environment import SettingsError
from loadtests.stand_in_engine import Speed, StandInEngine, serving
from tests.lane_scene import LaneScene, create_topics
from tests.relay_sender import relay

pytestmark = pytest.mark.wall_clock

TO_US = (RelayedLane(lane=0, epoch=1),)


@asynccontextmanager
async def serving_scene(
    base: Path, engine: StandInEngine, **settings: object
) -> AsyncIterator[tuple[LaneScene, str]]:
    async with serving(engine) as url:
        log = MemoryLog(run="r")
        await create_topics(log)
        scene = LaneScene(log, model=base, engine_url=url)
        async with scene.serving(**settings):
            report = await scene.report(is_serving=True)
            yield scene, report.weights_address


async def test_relayed_weights_are_loaded_once_they_are_published(
    base: Path, trained: Path, tmp_path: Path
) -> None:
    """Not before, although they are here; and from here, since the durable copy is gone."""
    engine = StandInEngine(Speed())
    cache = tmp_path / "cache"
    async with serving_scene(base, engine, cache=cache) as (scene, address):
        relayed = await relay(trained, [address], version=1)
        await scene.report(is_serving=True)
        assert (relayed.lane, relayed.left_out, engine.weight_version) == (0, {}, "0.0")
        await scene.publish(trained, version=1, relayed_to=TO_US)
        shutil.rmtree(trained)
        _, loaded = await scene.loaded(count=2)
    assert (loaded.version, loaded.path, engine.weight_version) == (1, "fast", "1.1")
    assert loaded.paused_s > 0


async def test_the_engine_generates_while_the_relay_is_awaited(base: Path, trained: Path) -> None:
    engine = StandInEngine(Speed(tokens=4))
    async with serving_scene(base, engine) as (scene, address):
        await scene.publish(trained, version=1, relayed_to=TO_US)
        await scene.request(1, [5, 6, 7])
        (record,) = await scene.finished(count=1)
        await relay(trained, [address], version=1)
        _, loaded = await scene.loaded(count=2)
    assert [span.version for span in record.spans] == [0]
    assert loaded.path == "fast"
    assert loaded.duration_s > loaded.paused_s


@pytest.mark.slow
async def test_what_the_relay_does_not_bring_comes_from_the_durable_copy_at_the_deadline(
    base: Path, trained: Path
) -> None:
    engine = StandInEngine(Speed())
    async with serving_scene(base, engine) as (scene, _):
        await scene.publish(trained, version=1, relayed_to=TO_US, deadline_s=1.0)
        _, loaded = await scene.loaded(count=2)
        (failed,) = scene.events_named("relay_failed")
    assert (loaded.path, engine.weight_version) == ("durable", "1.1")
    assert failed["error"] == "not whole within 1.0 s"
    assert 1.0 <= loaded.duration_s < 10


async def test_other_bytes_than_were_published_are_not_loaded(base: Path, trained: Path) -> None:
    engine = StandInEngine(Speed())
    async with serving_scene(base, engine) as (scene, address):
        await relay(base, [address], version=1)
        await scene.publish(trained, version=1, relayed_to=TO_US)
        _, loaded = await scene.loaded(count=2)
        (failed,) = scene.events_named("relay_failed")
    assert loaded.path == "durable"
    assert failed["error"] == "the relay brought other bytes than were published"


async def test_what_was_relayed_to_an_older_epoch_is_not_waited_for(
    base: Path, trained: Path
) -> None:
    engine = StandInEngine(Speed())
    async with serving_scene(base, engine) as (scene, _):
        to = (replace(TO_US[0], epoch=7),)
        await scene.publish(trained, version=1, relayed_to=to, deadline_s=60.0)
        _, loaded = await scene.loaded(count=2)
    assert loaded.path == "durable"
    assert loaded.duration_s < 30


async def test_a_host_that_is_no_address_of_this_machine_is_named(base: Path) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with serving_scene(base, StandInEngine(Speed()), host="192.0.2.1"):
            await asyncio.sleep(1)
    assert caught.group_contains(SettingsError, match="FORGEMQ_INFERENCE_HOST")


def test_records_without_a_relay_are_read_and_written_as_before() -> None:
    record = PublishedWeights(lineage=1, version=1, sha256="a" * 64, uri="/w", size_bytes=1)
    value = topics.encode(record)
    assert b"relayed_to" not in value
    assert topics.decode(topics.PUBLISHED_WEIGHTS, value) == record
