"""The recipe for Qwen3 on a broker and an engine of its own, with the model scaled down."""

import pytest
from datasets import Dataset

from tests.integration.launched_run import LaunchedRun
from tests.unit.recipes.recipe import write_scaled_model

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 2
GROUPS = 2
"""Of a step."""

SCALED_DOWN = (
    "model.dtype=float32",
    "model.context_tokens_max=512",
    "queues.maths.group_size=4",
    f"queues.maths.groups_per_step={GROUPS}",
    "queues.maths.slots=4",
    "queues.maths.window=2",
    "episodes.concurrent_max=16",
    "episodes.sampling.max_tokens=64",
    "evaluation.tasks=2",
    "evaluation.every_steps=0",
    f"trainer.steps={STEPS}",
    "trainer.world_size=1",
    "trainer.checkpoint_every_steps=1",
    "log.lanes=1",
    "log.group_partitions=2",
)


def test_the_maths_recipe_plays_and_trains_with_the_scaled_model(
    kafka_bootstrap, new_run_id, tmp_path
):
    """Random weights solve nothing: what differs in a group is what a mixture of scripts costs."""
    run_id, model = new_run_id(), write_scaled_model(tmp_path / "model")
    data = tmp_path / "maths"
    rows = [{"problem": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(40)]
    for split, part in (("train", rows[:20]), ("test", rows[20:])):
        Dataset.from_list(part).to_parquet(data / f"{split}-00000-of-00001.parquet")
    files = (f"queues.maths.{name}={data}" for name in ("task_file", "held_out_file"))
    run = LaunchedRun(tmp_path, {"FORGEMQ_KAFKA": kafka_bootstrap})
    try:
        run.start(
            "deploy/recipes/qwen3-4b/maths.toml",
            f"run={run_id}",
            f"model.path={model}",
            *files,
            *SCALED_DOWN,
        )
        assert run.wait_for_end(within_s=600) == 0, run.story()
    finally:
        run.close()
    report = run.report(run_id)
    assert report["guarantees"] == dict.fromkeys(("G1", "G2", "G3", "G4", "G5"), True)
    assert report["groups_retired"]["trained"] == STEPS * GROUPS
    assert report["success_end"] == 0.0
    # Its MLP has an inner size that the engine pads.
    said = (run.runs / run_id / "logs" / "inference-0.log").read_text()
    assert '"event":"loaded_weights"' in said
    assert [name for name in ("wrong_tensor", "read_back_off") if name in said] == []
