"""Short runs of the demo on the real broker and the real engine: reward teaches, noise does not."""

import statistics
from pathlib import Path

import pytest

from tests.integration.launched_run import LaunchedRun, curves_of_the_demo

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(1200)]

STEPS = 16
FIRST, LAST = 4, 6
"""Versions compared. Each has about 64 episodes, so the means differ by chance by about 0.04."""

FOUR_UPDATES = ("updates.minibatches=4", "optimizer.lr=4e-4")
"""Each update has a quarter of the step's groups, so its learning rate is smaller."""


ADAPTERS = ("lora.rank=16", "optimizer.lr=4e-3")
"""Adapters of every linear layer; they want a larger rate than all weights."""


def success_at_both_ends(
    folder: Path, run_id: str, *overrides: str, environ: dict[str, str]
) -> tuple[float, float]:
    """Mean success on training tasks under the first and under the last weight versions."""
    run = LaunchedRun(folder, environ)
    rows = curves_of_the_demo(run, run_id, *overrides, steps=STEPS)
    # Versions that sampled few training groups have no success.
    success = [row["success"] for row in rows if "success" in row]
    assert len(success) >= STEPS - 4
    return statistics.mean(success[:FIRST]), statistics.mean(success[-LAST:])


def test_success_rises_within_sixteen_steps(kafka_bootstrap, base_engine_url, new_run_id, tmp_path):
    environ = {"FORGEMQ_KAFKA": kafka_bootstrap, "FORGEMQ_ENGINE_URL": base_engine_url}
    first, last = success_at_both_ends(tmp_path, new_run_id(), environ=environ)
    assert last > first + 0.05


def test_success_rises_within_sixteen_steps_of_four_updates_each(
    kafka_bootstrap, base_engine_url, new_run_id, tmp_path
):
    environ = {"FORGEMQ_KAFKA": kafka_bootstrap, "FORGEMQ_ENGINE_URL": base_engine_url}
    first, last = success_at_both_ends(tmp_path, new_run_id(), *FOUR_UPDATES, environ=environ)
    assert last > first + 0.05


def test_success_rises_with_adapters_that_engines_load_and_both_sides_agree(
    kafka_bootstrap, new_run_id, tmp_path
):
    """The run starts the engine, as one with adapters has flags of its own."""
    run, run_id = LaunchedRun(tmp_path, {"FORGEMQ_KAFKA": kafka_bootstrap}), new_run_id()
    rows = curves_of_the_demo(run, run_id, *ADAPTERS, steps=STEPS)
    success = [row["success"] for row in rows if "success" in row]
    assert len(success) >= STEPS - 4
    assert statistics.mean(success[-LAST:]) > statistics.mean(success[:FIRST]) + 0.05
    gaps = [row["logprob_gap_max"] for row in rows if row.get("logprob_gap_max") is not None]
    assert len(gaps) >= STEPS - 4
    assert max(gaps) < 1e-3


@pytest.mark.parametrize("updates", [(), FOUR_UPDATES], ids=["one", "four"])
def test_with_returns_shuffled_inside_each_group_success_does_not_rise(
    kafka_bootstrap, base_engine_url, new_run_id, tmp_path, updates
):
    environ = {"FORGEMQ_KAFKA": kafka_bootstrap, "FORGEMQ_ENGINE_URL": base_engine_url}
    chosen = ("rewards.shuffle_returns=true", *updates)
    first, last = success_at_both_ends(tmp_path, new_run_id(), *chosen, environ=environ)
    assert last < first + 0.1
