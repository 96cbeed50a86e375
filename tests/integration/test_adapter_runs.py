"""A whole run with adapters that are merged into the weights of each version."""

import pytest
import torch
from safetensors.torch import load_file

from forgemq_trainer.merge_adapter import merge_adapter
from tests.integration.launched_run import LaunchedRun, curves_of_the_demo

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(1200)]

STEPS = 3
MERGED = ("lora.rank=16", "lora.publish=merged", "optimizer.lr=4e-3", "trainer.world_size=2")


def test_an_engine_without_adapters_samples_with_those_that_two_ranks_train_and_merge(
    kafka_bootstrap, base_engine_url, new_run_id, tmp_path
):
    """Its log-probabilities are the trainer's, which computes W x and B A x apart."""
    environ = {"FORGEMQ_KAFKA": kafka_bootstrap, "FORGEMQ_ENGINE_URL": base_engine_url}
    run, run_id = LaunchedRun(tmp_path, environ), new_run_id()
    rows = curves_of_the_demo(run, run_id, *MERGED, steps=STEPS)
    assert [row["step"] for row in rows] == list(range(STEPS))
    gaps = [gap for row in rows[1:] if (gap := row["logprob_gap_max"]) is not None]
    assert gaps
    assert max(gaps) < 1e-3
    report = run.report(run_id)
    assert report["guarantees"] == dict.fromkeys(("G1", "G2", "G3", "G4", "G5"), True)
    checkpoint = run.runs / run_id / "checkpoints" / "checkpoints" / f"step-{STEPS - 1:08d}"
    assert not list(checkpoint.glob("*.safetensors"))
    assert merge_adapter(checkpoint / "adapter", tmp_path / "exported") == 7 * 3
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    (version,) = run.blobs(run_id).rglob(f"1.{STEPS}")
    published = load_file(version / "model.safetensors")
    assert published.keys() == exported.keys()
    assert all(torch.equal(published[name], exported[name]) for name in exported)
