"""Weights that the relay brings into the stand-in engine, through the whole service."""

import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from msgspec.structs import replace
from stand_in_answers import Speed
from stand_in_engine import StandInEngine, serving

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.lane_plan import RequestedLane
from forgemq_contracts.weights import PublishedWeights, RelayedLane
from forgemq_inference.core.weights import weights_of_name
from forgemq_settings.environment import SettingsError
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
        assert (relayed.lane, relayed.left_out, weights_of_name(engine.weight_version)) == (
            0,
            {},
            (0, 0),
        )
        await scene.publish(trained, version=1, relayed_to=TO_US)
        shutil.rmtree(trained)
        _, loaded = await scene.loaded(count=2)
    assert (loaded.version, loaded.path, weights_of_name(engine.weight_version)) == (
        1,
        "fast",
        (1, 1),
    )
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


class _Watched(StandInEngine):
    """Says how many tokens wait to be read, and whether it is well."""

    waiting_tokens, is_well = 0, True

    def app(self) -> web.Application:
        app = super().app()
        app.add_routes([web.get("/v1/loads", self._loads)])
        return app

    async def _loads(self, _: web.Request) -> web.Response:
        load = {"num_waiting_uncached_tokens": self.waiting_tokens}
        return web.json_response({"loads": [load]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.is_well else 503)


async def _until_relay_is_awaited(scene: LaneScene, trained: Path) -> None:
    """Publish, and have a request answered that was written after that."""
    await scene.publish(trained, version=1, relayed_to=TO_US, deadline_s=60.0)
    await scene.request(1, [5, 6, 7])
    await scene.finished(count=1)


async def _until_reported(scene: LaneScene, *, waiting_tokens: int) -> None:
    while True:
        load = (await scene.report(is_serving=True)).load
        if load is not None and load.waiting_tokens == waiting_tokens:
            return
        await asyncio.sleep(0.02)


async def test_heartbeats_say_what_the_engine_has_to_do_while_the_relay_is_awaited(
    base: Path, trained: Path
) -> None:
    engine = _Watched(Speed(tokens=4))
    async with serving_scene(base, engine) as (scene, _):
        await _until_relay_is_awaited(scene, trained)
        engine.waiting_tokens = 777
        async with asyncio.timeout(10.0):
            await _until_reported(scene, waiting_tokens=777)


async def test_a_lane_is_drained_while_the_relay_is_awaited(base: Path, trained: Path) -> None:
    """Not after it; and it has the new weights all the same."""
    engine = _Watched(Speed(tokens=4))
    async with serving_scene(base, engine) as (scene, address):
        await _until_relay_is_awaited(scene, trained)
        drain = RequestedLane(lane=0, change="drain", change_id="0" * 32, requested_ms=0)
        await scene.write(topics.REQUESTED_LANES, 0, drain)
        await scene.report(is_serving=False, timeout_s=10.0)
        await relay(trained, [address], version=1)
        _, loaded = await scene.loaded(count=2)
    assert (loaded.version, loaded.path) == (1, "fast")


@pytest.mark.slow
async def test_an_engine_that_is_lost_while_the_relay_is_awaited_is_noticed_at_once(
    base: Path, trained: Path
) -> None:
    """Not at the deadline of the relay; and it has the weights once it is back."""
    engine = _Watched(Speed(tokens=4))
    async with serving_scene(base, engine) as (scene, address):
        await _until_relay_is_awaited(scene, trained)
        engine.is_well = False
        await scene.report(is_serving=False, timeout_s=10.0)
        engine.is_well = True
        await relay(trained, [address], version=1)
        _, loaded = await scene.loaded(count=2)
    assert (loaded.version, weights_of_name(engine.weight_version)) == (1, (1, 1))


@pytest.mark.slow
async def test_what_the_relay_does_not_bring_comes_from_the_durable_copy_at_the_deadline(
    base: Path, trained: Path
) -> None:
    engine = StandInEngine(Speed())
    async with serving_scene(base, engine) as (scene, _):
        await scene.publish(trained, version=1, relayed_to=TO_US, deadline_s=1.0)
        _, loaded = await scene.loaded(count=2)
        (failed,) = scene.events_named("relay_failed")
    assert (loaded.path, weights_of_name(engine.weight_version)) == ("durable", (1, 1))
    assert re.fullmatch(r"not whole after 1\.\d s of 1\.0 s", failed["error"])
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


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("192.0.2.1", "cannot listen at 192.0.2.1"),
        ("0.0.0.0", "0.0.0.0 stands for every address"),
    ],
)
async def test_a_host_at_which_others_cannot_reach_the_process_is_named(
    base: Path, host: str, reason: str
) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with serving_scene(base, StandInEngine(Speed()), host=host):
            await asyncio.sleep(1)
    assert caught.group_contains(SettingsError, match=f"FORGEMQ_INFERENCE_HOST: {reason}")


def test_records_without_a_relay_are_read_and_written_as_before() -> None:
    record = PublishedWeights(lineage=1, version=1, sha256="a" * 64, uri="/w", size_bytes=1)
    value = topics.encode(record)
    assert b"relayed_to" not in value
    assert topics.decode(topics.PUBLISHED_WEIGHTS, value) == record
