"""Whole runs on a real engine that guesses tokens ahead, and the audit of each.

One guesses with a small model. In the others a service is killed while a draft head is on its way,
which `kill_points/kill_point.py` does on the way of version 2. A run that only trains its head is
in `test_fleet_runs.py`.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from forgemq_contracts import topics
from forgemq_launcher.commands.new_head import write_new_head
from tests.engine_fixture import ENGINE_MODEL
from tests.integration.fleet_run import FleetRun
from tests.integration.killed_fleet import STEPS, of_two_lives, play_with_a_kill

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(1500)]


@pytest.fixture
def play(
    kafka_bootstrap: str, new_run_id: Callable[[], str], tmp_path: Path
) -> Callable[..., FleetRun]:
    """Plays a run that begins with a random head, with a kill."""
    write_new_head(ENGINE_MODEL, tmp_path / "head", seed=0)
    return partial(
        play_with_a_kill,
        bootstrap=kafka_bootstrap,
        run_id=new_run_id(),
        folder=tmp_path,
        overrides=(f"speculation.head={tmp_path / 'head'}", "speculation.learning_rate=5e-3"),
    )


def check_every_version_had_its_head(fleet: FleetRun) -> None:
    """Each version that a life trained came with a head, and no load went without it."""
    heads = [each.head for each in fleet.published() if each.version > 0]
    assert heads
    assert None not in heads
    assert fleet.events("inference-0", "head_not_loaded") == []
    finished = fleet.records(topics.FINISHED_COMPLETIONS)
    assert all(each.verifications > 0 for each in finished if len(each.output) > 4 * 8)


def test_a_run_guesses_with_a_small_model_that_no_version_changes(
    kafka_bootstrap, new_run_id, tmp_path
):
    """It is the base model, so it guesses the first version well; nothing of it is published."""
    fleet = FleetRun.on(kafka_bootstrap, new_run_id(), tmp_path / "run", steps=STEPS, environ={})
    fleet.play(f"speculation.model={ENGINE_MODEL}")
    assert [each.head for each in fleet.published()] == [None] * (STEPS + 1)
    assert [(each.version, each.path) for each in fleet.loaded(0)][:STEPS] == [
        (0, "start"),
        *((version, "fast") for version in range(1, STEPS)),
    ]
    points = fleet.run.report(fleet.run_id)["acceptance"]
    assert (points[0]["version"], points[0]["length"] > 2) == (0, True), points
    # The run's small model learns fast; a draft that was lost would give 1.0.
    assert all(1.4 < point["length"] <= 4 for point in points), points


def test_a_lane_killed_before_it_loads_a_version_also_has_its_head_from_the_durable_copy(
    play,
):
    fleet = play("inference", "between publication and load", way="relay")
    loaded = fleet.loaded(0)
    # Its successor loads policy and head before it serves, in a pause.
    start = next(each for each in loaded if each.epoch != loaded[0].epoch)
    assert (start.path, start.version >= 2, start.paused_s > 0) == ("start", True, True)
    assert {each.path for each in loaded if each.version > start.version} == {"fast"}
    check_every_version_had_its_head(fleet)


def test_a_trainer_killed_after_a_publication_goes_on_with_the_head_of_its_checkpoint(
    play,
):
    fleet = play("trainer", "before the checkpoint", way="gloo")
    assert fleet.publications() == of_two_lives(2, again=1)
    check_every_version_had_its_head(fleet)
    overlaps = [step.metrics.draft_overlap for step in fleet.records(topics.TRAINED_STEPS)]
    assert overlaps[-1] > 2 * overlaps[0] > 0, overlaps
