"""A GPU trains the first steps of a real run, whose rollouts a real engine sampled."""

from pathlib import Path

import msgspec
import pytest

from forgemq_contracts import topics
from forgemq_contracts.steps import TrainingMetrics
from forgemq_trainer.training import Training
from tests.gpu.recorded_run import RecordedRun, recorded_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    # torch reads `.grad` of every input while it compiles, and hides the warning from users.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

REPOSITORY = Path(__file__).parents[2]


def retrained(recorded: RecordedRun, *, dtype: str, device: str) -> list[TrainingMetrics]:
    """What a trainer on this device measures in the run's first steps."""
    model = msgspec.structs.replace(
        recorded.configuration.model,
        path=str(REPOSITORY / recorded.configuration.model.path),
        dtype=dtype,
    )
    configuration = msgspec.structs.replace(recorded.configuration, model=model)
    training = Training(configuration, device=device, checkpoint=None)
    values = {tree.group_id: topics.encode(tree) for tree in recorded.trees}
    steps = [training.read(scheduled, values) for scheduled in recorded.scheduled]
    assert [step.failed for step in steps] == [()] * len(steps)
    return [training.train(step) for step in steps]


def test_a_gpu_measures_what_the_runs_cpu_did_and_agrees_with_its_engine() -> None:
    recorded = recorded_run()
    for ours, theirs in zip(
        retrained(recorded, dtype="float32", device="cuda"), recorded.trained, strict=True
    ):
        expected = theirs.metrics
        assert ours.loss == pytest.approx(expected.loss, rel=1e-3, abs=1e-5)
        assert ours.grad_norm == pytest.approx(expected.grad_norm, rel=5e-3)
        assert ours.entropy == pytest.approx(expected.entropy, rel=1e-3)
        assert ours.loss_tokens == expected.loss_tokens
        if ours.logprob_gap is not None:  # The engine's log-probabilities, on a CPU.
            assert ours.logprob_gap.mean < 1e-4


def test_in_bfloat16_the_run_learns_the_same_within_rounding() -> None:
    recorded = recorded_run()
    for ours, theirs in zip(
        retrained(recorded, dtype="bfloat16", device="cuda"), recorded.trained, strict=True
    ):
        assert ours.loss == pytest.approx(theirs.metrics.loss, abs=2e-3)
        assert ours.grad_norm == pytest.approx(theirs.metrics.grad_norm, rel=0.1)
        assert ours.entropy == pytest.approx(theirs.metrics.entropy, rel=0.05)
        if ours.logprob_gap is not None:
            assert ours.logprob_gap.mean < 0.02
