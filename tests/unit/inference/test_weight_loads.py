"""Published weights into the stand-in engine, through the whole service."""

import asyncio
import shutil
import socket
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from stand_in_answers import Speed
from stand_in_engine import StandInEngine, serving

from forgemq_bus.memory import MemoryLog
from forgemq_contracts.weights import Rendezvous
from forgemq_inference.core.weights import weights_of_name
from tests.lane_scene import LaneScene, create_topics, name_of

CONTEXT = [5, 6, 7]


async def scene_of(base: Path, url: str) -> LaneScene:
    log = MemoryLog(run="r")
    await create_topics(log)
    return LaneScene(log, model=base, engine_url=url)


@asynccontextmanager
async def serving_scene(base: Path, engine: StandInEngine, **settings: object):
    async with serving(engine) as url:
        scene = await scene_of(base, url)
        async with scene.serving(**settings):
            await scene.report(is_serving=True)
            yield scene


@asynccontextmanager
async def rendezvous(
    *, group_name: str = "g", is_new: bool = True, epoch: int = 1, is_waiting: bool = True
):
    """An offer with its own port; the port is open if the publisher waits."""
    async with AsyncExitStack() as stack:
        port = stack.enter_context(socket.socket())
        port.bind(("127.0.0.1", 0))
        offer = Rendezvous(
            lane=0,
            epoch=epoch,
            host="127.0.0.1",
            port=port.getsockname()[1],
            group_name=group_name,
            backend="gloo",
            is_new=is_new,
        )
        if is_waiting:
            server = await asyncio.start_server(lambda _, writer: writer.close(), sock=port)
            await stack.enter_async_context(server)
        yield offer


async def test_a_fresh_lane_says_that_it_serves_the_base_model(base: Path) -> None:
    async with serving_scene(base, StandInEngine(Speed())) as scene:
        (loaded,) = await scene.loaded(count=1)
    assert (loaded.lineage, loaded.version, loaded.path, loaded.epoch) == (0, 0, "start", 1)


async def test_the_first_publication_of_the_base_bytes_changes_only_the_name(base: Path) -> None:
    engine = StandInEngine(Speed(tokens=2))
    engine.model_path = str(base)
    async with serving_scene(base, engine) as scene:
        await scene.publish(base, version=0)
        _, loaded = await scene.loaded(count=2)
        await scene.request(1, CONTEXT)
        (record,) = await scene.finished(count=1)
    assert (loaded.lineage, loaded.version, loaded.path, loaded.paused_s) == (1, 0, "start", 0.0)
    assert (weights_of_name(engine.weight_version), record.spans[0].lineage) == ((1, 0), 1)


async def test_an_engine_that_began_with_another_model_loads_the_runs(
    base: Path, trained: Path
) -> None:
    """By the bytes of its own folder, which is on this machine or is not."""
    for folder in (str(trained), "/elsewhere/model"):
        engine = StandInEngine(Speed())
        engine.model_path = folder
        async with serving_scene(base, engine) as scene:
            await scene.publish(base, version=0)
            _, loaded = await scene.loaded(count=2)
        (event,) = scene.events_named("engine_of_another_model")
        assert (event["folder"], event["wanted"]) == (folder, str(base))
        assert (loaded.version, loaded.path) == (0, "durable")
        assert (weights_of_name(engine.weight_version), engine.model_path) == ((1, 0), str(base))


async def test_an_engine_that_began_with_a_copy_of_the_model_loads_nothing(
    base: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(base, tmp_path / "copy")
    engine = StandInEngine(Speed())
    engine.model_path = str(copy)
    async with serving_scene(base, engine) as scene:
        await scene.publish(base, version=0)
        _, loaded = await scene.loaded(count=2)
    assert (loaded.version, loaded.path, engine.model_path) == (0, "start", str(copy))


async def test_new_weights_come_from_the_durable_copy_if_no_fast_path_is_offered(
    base: Path, trained: Path
) -> None:
    engine = StandInEngine(Speed())
    async with serving_scene(base, engine) as scene:
        await scene.publish(trained, version=1)
        _, loaded = await scene.loaded(count=2)
        report = await scene.report(is_serving=True)
    assert (loaded.version, loaded.path, weights_of_name(engine.weight_version)) == (
        1,
        "durable",
        (1, 1),
    )
    assert loaded.duration_s >= loaded.paused_s > 0
    assert report.version == 1


class _SlowToLoad(StandInEngine):
    """Reads a folder only once it may."""

    def __init__(self, speed: Speed) -> None:
        super().__init__(speed)
        self.is_asked, self.may_load = asyncio.Event(), asyncio.Event()

    async def _load(self, http: web.Request) -> web.Response:
        self.is_asked.set()
        await self.may_load.wait()
        return await super()._load(http)


async def test_each_of_two_loads_in_a_row_is_recorded_as_the_version_that_it_brought(
    base: Path, trained: Path
) -> None:
    """The second version is published while the engine loads the first."""
    engine = _SlowToLoad(Speed())
    async with serving_scene(base, engine) as scene:
        await scene.publish(trained, version=1)
        await engine.is_asked.wait()
        await scene.publish(trained, version=2)
        await asyncio.sleep(1.0)
        engine.may_load.set()
        loaded = await scene.loaded(count=3)
    assert [(each.version, each.path) for each in loaded[:2]] == [(0, "start"), (1, "durable")]
    assert [each.version for each in loaded] == [0, 1, 2]


async def test_the_fast_path_receives_every_tensor_once_in_name_order(
    base: Path, trained: Path
) -> None:
    engine = StandInEngine(Speed(pretends_groups=True))
    async with serving_scene(base, engine) as scene, rendezvous() as offer:
        await scene.publish(trained, version=1, fast_paths=(offer,))
        _, loaded = await scene.loaded(count=2)
    assert loaded.path == "fast"
    (body,) = engine.received
    assert body["names"] == [f"layers.{i}.weight" for i in range(4)]
    assert body["shapes"] == [[8, 4]] * 4
    assert (body["load_format"], body["flush_cache"]) == ("flattened_bucket", True)
    assert body["weight_version"] == name_of(trained, version=1)


async def test_a_joined_group_is_used_again_and_an_unknown_one_is_not(
    base: Path, trained: Path
) -> None:
    engine = StandInEngine(Speed(pretends_groups=True))
    async with serving_scene(base, engine) as scene, rendezvous() as offer:
        await scene.publish(trained, version=1, fast_paths=(offer,))
        await scene.loaded(count=2)
        async with rendezvous(is_new=False) as again:
            await scene.publish(trained, version=2, fast_paths=(again,), sha256="a" * 64)
            await scene.loaded(count=3)
        async with rendezvous(is_new=False, group_name="unknown") as unknown:
            await scene.publish(base, version=3, fast_paths=(unknown,))
            loaded = await scene.loaded(count=4)
    assert [record.path for record in loaded] == ["start", "fast", "fast", "durable"]


async def test_an_engine_leaves_the_group_of_a_trainer_that_offers_another(
    base: Path, trained: Path
) -> None:
    """As a trainer that starts again does. The engine keeps a group until it is asked to leave it,
    and a group of NCCL takes memory of its GPU."""
    engine = StandInEngine(Speed(pretends_groups=True))
    async with serving_scene(base, engine) as scene:
        for version, name in enumerate(("first", "second", "third"), start=1):
            async with rendezvous(group_name=name) as offer:
                sha256 = f"{version:064}"
                await scene.publish(trained, version=version, fast_paths=(offer,), sha256=sha256)
                loaded = await scene.loaded(count=1 + version)
        assert engine.groups == {"third"}
    assert [record.path for record in loaded] == ["start", "fast", "fast", "fast"]


async def test_a_refused_process_group_falls_back_to_the_durable_copy(
    base: Path, trained: Path
) -> None:
    engine = StandInEngine(Speed(pretends_groups=False))
    async with serving_scene(base, engine) as scene, rendezvous() as offer:
        await scene.publish(trained, version=1, fast_paths=(offer,))
        _, loaded = await scene.loaded(count=2)
    assert (loaded.path, weights_of_name(engine.weight_version)) == ("durable", (1, 1))
    assert "process group" in scene.events_named("fast_path_failed")[0]["error"]


async def test_a_publisher_that_is_gone_falls_back_to_the_durable_copy(
    base: Path, trained: Path
) -> None:
    engine = StandInEngine(Speed(pretends_groups=True))
    async with serving_scene(base, engine) as scene, rendezvous(is_waiting=False) as offer:
        await scene.publish(trained, version=1, fast_paths=(offer,))
        _, loaded = await scene.loaded(count=2)
    assert loaded.path == "durable"
    assert "nobody listens" in scene.events_named("fast_path_failed")[0]["error"]


async def test_an_offer_to_an_older_epoch_is_not_taken(base: Path, trained: Path) -> None:
    engine = StandInEngine(Speed(pretends_groups=True))
    async with serving_scene(base, engine) as scene, rendezvous(epoch=7) as offer:
        await scene.publish(trained, version=1, fast_paths=(offer,))
        _, loaded = await scene.loaded(count=2)
    assert (loaded.path, engine.received) == ("durable", [])


async def test_requests_during_a_load_are_delayed_and_span_both_versions(
    base: Path, trained: Path
) -> None:
    engine = StandInEngine(Speed(latency_s=1.0, tokens=16))
    async with serving_scene(base, engine) as scene:
        await scene.request(1, CONTEXT, max_tokens=16)
        await asyncio.sleep(0.5)
        await scene.publish(trained, version=1)
        (record,) = await scene.finished(count=1)
    (first, second) = record.spans
    assert (first.start, first.version, second.end, second.version) == (0, 0, 16, 1)
    assert first.end == second.start
    assert record.finish_reason == "length"


async def test_a_late_joiner_starts_on_the_newest_durable_copy_of_the_newest_lineage(
    base: Path, trained: Path
) -> None:
    engine = StandInEngine(Speed())
    async with serving(engine) as url:
        scene = await scene_of(base, url)
        await scene.publish(base, lineage=1, version=8)
        await scene.publish(trained, lineage=2, version=5)
        await scene.publish(base, lineage=1, version=9)
        async with scene.serving():
            report = await scene.report(is_serving=True)
            (loaded,) = await scene.loaded(count=1)
    assert (report.lineage, report.version, weights_of_name(engine.weight_version)) == (
        2,
        5,
        (2, 5),
    )
    assert loaded.path == "start"


async def test_an_engine_left_in_a_broken_update_is_loaded_again_before_it_serves(
    base: Path, trained: Path
) -> None:
    engine = StandInEngine(Speed(), weight_version="broken")
    async with serving(engine) as url:
        scene = await scene_of(base, url)
        await scene.publish(trained, version=3)
        async with scene.serving():
            await scene.report(is_serving=True)
    assert weights_of_name(engine.weight_version) == (1, 3)


@pytest.mark.parametrize("name", ["broken", "1.40"])
async def test_an_engine_with_unknown_weights_never_serves_without_published_ones(
    base: Path, trained: Path, name: str
) -> None:
    """An update broke off, or another run loaded it."""
    engine = StandInEngine(Speed(), weight_version=name)
    async with serving(engine) as url:
        scene = await scene_of(base, url)
        async with scene.serving():
            await scene.until_event("waits_for_copy")
            assert not (await scene.report(is_serving=False)).is_serving
            assert engine.weight_version == "broken"
            await scene.publish(trained, version=1)
            report = await scene.report(is_serving=True)
    assert (report.lineage, report.version, weights_of_name(engine.weight_version)) == (
        1,
        1,
        (1, 1),
    )


async def test_an_engine_that_another_run_has_loaded_gets_the_weights_of_this_one(
    base: Path, trained: Path
) -> None:
    engine = StandInEngine(Speed(), weight_version="1.40")
    async with serving(engine) as url:
        scene = await scene_of(base, url)
        await scene.publish(trained, version=3)
        async with scene.serving():
            report = await scene.report(is_serving=True)
    assert (report.lineage, report.version, weights_of_name(engine.weight_version)) == (
        1,
        3,
        (1, 3),
    )
    assert [each["weights"] for each in scene.events_named("weights_of_another_run")] == ["1.40"]


async def test_a_damaged_durable_copy_is_never_loaded(base: Path, trained: Path) -> None:
    engine = StandInEngine(Speed())
    async with serving(engine) as url:
        scene = await scene_of(base, url)

        async def serve() -> None:
            async with scene.serving(load_attempts_max=2):
                await scene.publish(trained, version=1, sha256="0" * 64)
                await asyncio.sleep(10)

        with pytest.raises(ExceptionGroup):
            await serve()
    assert weights_of_name(engine.weight_version) == (0, 0)
    assert "published was 0000" in scene.events_named("load_failed")[-1]["error"]


async def test_a_damaged_copy_is_passed_over_when_a_newer_version_comes(
    base: Path, trained: Path
) -> None:
    engine = StandInEngine(Speed())
    async with serving_scene(base, engine, load_attempts_max=5) as scene:
        await scene.publish(trained, version=1, sha256="0" * 64)
        await scene.until_event("load_failed")
        await scene.publish(trained, version=2)
        _, loaded = await scene.loaded(count=2)
    assert loaded.version == 2
