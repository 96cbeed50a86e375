"""An engine that another run has loaded never serves that run's weights as this one's."""

from pathlib import Path

import pytest
from stand_in_answers import Speed
from stand_in_engine import StandInEngine, serving

from tests.lane_scene import name_of
from tests.unit.inference.test_weight_loads import scene_of


def named(name: str, *, holds: Path) -> StandInEngine:
    engine = StandInEngine(Speed(), weight_version=name)
    engine.model_path = str(holds)
    return engine


@pytest.mark.parametrize("has_newer", [False, True])
@pytest.mark.parametrize("marks", ["", "-0123456789ab"])
async def test_a_version_of_another_run_with_an_equal_number_is_replaced_by_the_runs_own(
    base: Path, trained: Path, marks: str, has_newer: bool
) -> None:
    """Also while a newer version is published and has no durable copy yet."""
    engine = named(f"1.3{marks}", holds=base)
    async with serving(engine) as url:
        scene = await scene_of(base, url)
        await scene.publish(trained, version=3)
        if has_newer:
            await scene.publish(base, version=4, durable_before=trained)
        async with scene.serving():
            report = await scene.report(is_serving=True)
    assert (report.lineage, report.version) == (1, 3)
    assert (engine.weight_version, engine.model_path) == (name_of(trained, version=3), str(trained))
    (event,) = scene.events_named("weights_of_another_run")
    assert event["weights"] == f"1.3{marks}"


async def test_an_engine_that_has_the_runs_weights_serves_them_without_a_load(
    base: Path, trained: Path
) -> None:
    """As after a death of the inference process beside it, or when the run is resumed."""
    engine = named(name_of(trained, version=3), holds=trained)
    async with serving(engine) as url:
        scene = await scene_of(base, url)
        await scene.publish(trained, version=3)
        async with scene.serving():
            await scene.report(is_serving=True)
            (loaded,) = await scene.loaded(count=1)
    assert (loaded.version, loaded.path, loaded.paused_s) == (3, "start", 0.0)
    assert scene.events_named("weights_of_another_run") == []
    assert engine.weight_version == name_of(trained, version=3)
