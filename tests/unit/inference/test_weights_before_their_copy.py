"""Weights that are published before their durable copy: what a lane loads, and when."""

import asyncio
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stand_in_answers import Speed
from stand_in_engine import StandInEngine, serving

from forgemq_bus.memory import MemoryLog
from forgemq_contracts.topics import REPORTED_ENGINES, decode
from forgemq_contracts.weights import PublishedWeights, Rendezvous
from forgemq_inference.core.weights import (
    BASE,
    DurableLoad,
    FastLoad,
    RelayedLoad,
    WeightsState,
    served_by,
    weights_of_name,
)
from tests.lane_scene import LaneScene, create_topics
from tests.relay_sender import relay
from tests.unit.inference.conftest import write_model
from tests.unit.inference.test_relayed_loads import TO_US, serving_scene
from tests.unit.inference.test_weight_loads import rendezvous

OFFER = Rendezvous(lane=0, epoch=1, host="h", port=1, group_name="g", backend="gloo", is_new=True)


def published(version: int, *, is_durable: bool, **fields: object) -> PublishedWeights:
    values = {"sha256": f"{version:064}", "uri": f"/w/{version}", "size_bytes": 1} | fields
    return PublishedWeights(lineage=1, version=version, is_durable=is_durable, **values)


def state() -> WeightsState:
    return WeightsState(lane=0, epoch=1, served=served_by(BASE.name, base_sha256=None))


# What comes next


def test_a_lane_that_is_not_named_waits_for_the_copy_on_the_durable_one_before() -> None:
    lane = state()
    lane.observe(before := published(1, is_durable=True))
    lane.observe(published(2, is_durable=False, fast_paths=(), relayed_to=()))
    assert lane.next_load() == DurableLoad(before)
    lane.note_loaded(before)
    assert lane.next_load() is None
    assert lane.observe(copy := published(2, is_durable=True))
    assert lane.next_load() == DurableLoad(copy)


@pytest.mark.parametrize("way", [{"fast_paths": (OFFER,)}, {"relayed_to": TO_US}])
def test_a_lane_that_is_named_loads_at_once_and_its_copy_changes_nothing_then(
    way: dict[str, object],
) -> None:
    lane = state()
    lane.observe(early := published(2, is_durable=False, **way))
    assert isinstance(load := lane.next_load(), FastLoad | RelayedLoad)
    assert load.published == early
    lane.note_loaded(early)
    lane.observe(published(2, is_durable=True, **way))
    assert lane.next_load() is None


def test_the_copy_of_an_older_version_is_no_news_once_a_newer_one_is_published() -> None:
    lane = state()
    lane.observe(early := published(3, is_durable=False, fast_paths=(OFFER,)))
    assert not lane.observe(published(2, is_durable=True))
    assert not lane.observe(published(3, is_durable=False))
    assert lane.next_load() == FastLoad(early, OFFER)


def test_a_fast_path_that_failed_is_not_tried_again_when_the_copy_comes() -> None:
    lane = state()
    lane.observe(early := published(2, is_durable=False, relayed_to=TO_US))
    lane.note_failed(early)
    assert lane.next_load() is None
    lane.observe(copy := published(2, is_durable=True, relayed_to=TO_US))
    assert lane.next_load() == DurableLoad(copy)


@given(
    steps=st.lists(st.sampled_from(["early", "copy", "load", "fail", "break"]), max_size=30),
    is_named=st.booleans(),
)
def test_whatever_fails_a_lane_reads_only_copies_that_exist_and_ends_on_the_newest(
    steps: list[str], is_named: bool
) -> None:
    lane, version, durable = state(), 1, 0
    way = {"fast_paths": (OFFER,)} if is_named else {}
    for step in [*steps, "copy", "load", "load"]:
        before = lane.served
        if step == "early" and durable == version - 1:
            lane.observe(published(version, is_durable=False, **way))
        elif step == "copy":
            lane.observe(published(version, is_durable=True, **way))
            durable, version = version, version + 1
        elif load := lane.next_load():
            if isinstance(load, DurableLoad):
                assert load.published.is_durable
                assert load.published.version <= durable
            if step == "load":
                lane.note_loaded(load.published)
                assert lane.served.weights >= before.weights or before.is_dirty
            elif step == "break":
                lane.note_broken()
            if step in ("fail", "break") and not isinstance(load, DurableLoad):
                lane.note_failed(load.published)
    assert (lane.served.weights, lane.served.sha256) == ((1, durable), f"{durable:064}")


# Through the service, into the stand-in engine


async def test_the_fast_path_needs_no_copy_of_what_it_brings(base: Path, trained: Path) -> None:
    """The names and shapes of the tensors are those of the version before."""
    engine = StandInEngine(Speed(pretends_groups=True))
    engine.model_path = str(base)
    async with serving_scene(base, engine) as (scene, _), rendezvous() as offer:
        await scene.publish(base, version=1)
        await scene.loaded(count=2)
        await scene.publish(trained, version=2, fast_paths=(offer,), durable_before=base)
        shutil.rmtree(trained)
        loaded = await scene.loaded(count=3)
    assert [(each.version, each.path) for each in loaded[1:]] == [(1, "start"), (2, "fast")]
    assert engine.received[0]["names"] == [f"layers.{i}.weight" for i in range(4)]
    assert weights_of_name(engine.weight_version) == (1, 2)


@pytest.mark.wall_clock
async def test_the_relay_needs_no_copy_of_what_it_brings(base: Path, trained: Path) -> None:
    engine = StandInEngine(Speed())
    async with serving_scene(base, engine) as (scene, address):
        await relay(trained, [address], version=2)
        await scene.publish(trained, version=2, relayed_to=TO_US, durable_before=base)
        shutil.rmtree(trained)
        _, loaded = await scene.loaded(count=2)
    assert (loaded.version, loaded.path, weights_of_name(engine.weight_version)) == (
        2,
        "fast",
        (1, 2),
    )


async def test_an_engine_whose_fast_path_breaks_goes_on_with_the_durable_version_before(
    base: Path, trained: Path
) -> None:
    """And loads the new one when its copy is there; between both it serves."""
    engine = StandInEngine(Speed(pretends_groups=False, tokens=2))
    async with serving_scene(base, engine) as (scene, _), rendezvous() as offer:
        await scene.publish(trained, version=1)
        await scene.loaded(count=2)
        await scene.publish(base, version=2, fast_paths=(offer,), durable_before=trained)
        loaded = await scene.loaded(count=3)
        await scene.request(1, [5, 6, 7])
        (record,) = await scene.finished(count=1)
        await scene.publish(base, version=2, fast_paths=(offer,))
        *_, last = await scene.loaded(count=4)
    assert [(each.version, each.path) for each in loaded[1:]] == [(1, "durable"), (1, "durable")]
    assert [span.version for span in record.spans] == [1]
    assert (last.version, last.path, weights_of_name(engine.weight_version)) == (
        2,
        "durable",
        (1, 2),
    )
    assert len(scene.events_named("fast_path_failed")) == 1


@pytest.mark.wall_clock
async def test_an_engine_that_the_relay_misses_is_not_paused_until_the_copy_comes(
    base: Path, trained: Path
) -> None:
    engine = StandInEngine(Speed(tokens=2))
    async with serving_scene(base, engine) as (scene, _):
        await scene.publish(
            trained, version=2, relayed_to=TO_US, deadline_s=0.5, durable_before=base
        )
        await scene.until_event("relay_failed")
        await scene.request(1, [5, 6, 7])
        (record,) = await scene.finished(count=1)
        assert len(await scene.loaded(count=1)) == 1
        await scene.publish(trained, version=2, relayed_to=TO_US)
        _, loaded = await scene.loaded(count=2)
    assert [span.version for span in record.spans] == [0]
    assert (loaded.version, loaded.path, weights_of_name(engine.weight_version)) == (
        2,
        "durable",
        (1, 2),
    )


@pytest.mark.slow
@pytest.mark.wall_clock
async def test_a_copy_that_is_published_during_the_relay_is_loaded_after_one_deadline(
    base: Path, trained: Path
) -> None:
    engine = StandInEngine(Speed())
    async with serving_scene(base, engine) as (scene, _):
        for durable_before in (base, None):
            await scene.publish(
                trained,
                version=2,
                relayed_to=TO_US,
                deadline_s=2.0,
                durable_before=durable_before,
            )
        _, loaded = await scene.loaded(count=2)
        assert len(scene.events_named("relay_failed")) == 1
    assert (loaded.version, loaded.path) == (2, "durable")


@pytest.mark.wall_clock
async def test_the_relay_of_a_trainer_that_died_is_not_waited_for_once_its_next_life_publishes(
    base: Path, trained: Path
) -> None:
    engine = StandInEngine(Speed())
    async with serving_scene(base, engine) as (scene, _):
        await scene.publish(
            trained, version=2, relayed_to=TO_US, deadline_s=60.0, durable_before=base
        )
        await asyncio.sleep(0.5)
        await scene.publish(trained, lineage=2, version=1)
        _, loaded = await scene.loaded(count=2)
        assert scene.events_named("relay_failed") == []
    assert (loaded.lineage, loaded.version, loaded.path) == (2, 1, "durable")
    assert loaded.duration_s < 30


async def test_an_engine_that_joins_between_a_version_and_its_copy_serves_the_one_before(
    base: Path, trained: Path, tmp_path: Path
) -> None:
    engine, newer = StandInEngine(Speed()), write_model(tmp_path / "newer", seed=2)
    async with serving(engine) as url:
        log = MemoryLog(run="r")
        await create_topics(log)
        scene = LaneScene(log, model=base, engine_url=url)
        await scene.publish(trained, version=4)
        await scene.publish(newer, version=5, durable_before=trained)
        async with scene.serving():
            report = await scene.report(is_serving=True)
            assert (report.version, weights_of_name(engine.weight_version)) == (4, (1, 4))
            await scene.publish(newer, version=5)
            _, loaded = await scene.loaded(count=2)
    assert (loaded.version, loaded.path) == (5, "durable")


async def test_an_engine_that_starts_again_before_the_copy_is_there_serves_nothing_older(
    base: Path, trained: Path
) -> None:
    """Its lane has named the version: under the same epoch all readers count on it (staleness)."""
    engine = StandInEngine(Speed(pretends_groups=True))
    async with serving_scene(base, engine) as (scene, _):
        await scene.publish(base, version=1)
        await scene.loaded(count=2)
        async with rendezvous() as offer:
            await scene.publish(trained, version=2, fast_paths=(offer,), durable_before=base)
            await scene.loaded(count=3)
        engine.weight_version = BASE.name
        async with asyncio.timeout(20.0):
            await scene.until_event("waits_for_copy")
        await scene.publish(trained, version=2, fast_paths=(offer,))
        await scene.report(is_serving=True)
        records = await scene.read(REPORTED_ENGINES.name, 0)
    reports = [decode(REPORTED_ENGINES, each.value) for each in records]
    served = [each.version for each in reports if each.is_serving]
    assert served == sorted(served)
    assert (served[0], served[-1], weights_of_name(engine.weight_version)) == (0, 2, (1, 2))
