"""G5 on a run: mean and quantile of the gap, with limits between rounding and faults."""

import msgspec
import numpy as np
import pytest

from forgemq_audit.same_logprobs import (
    FP8_BLOCKS_LIMITS,
    LIMITS,
    gap_text,
    gap_violations,
    limits_of,
)
from forgemq_contracts.gaps import Audit, LogprobGap
from forgemq_contracts.steps import TrainedStep
from forgemq_trainer.core.metrics import gap_of
from tests.unit.run_view.synthetic import configuration, metrics

BFLOAT16 = LIMITS["bfloat16"]


def _step(step: int, gaps: np.ndarray | None) -> TrainedStep:
    gap = None if gaps is None else gap_of(gaps)
    measured = metrics(gap_entries=0) if gap is None else metrics()
    return TrainedStep(
        step=step,
        lineage=1,
        group_ids=("g-0",),
        failed_group_ids=(),
        metrics=msgspec.structs.replace(measured, logprob_gap=gap),
        checkpoint_step=step,
        duration_s=1.0,
    )


def _noise(mean: float, count: int, seed: int = 0) -> np.ndarray:
    """Gaps as rounding makes them: the size of normal deviates."""
    sigma = mean * np.sqrt(np.pi / 2)
    return np.abs(np.random.default_rng(seed).normal(scale=sigma, size=count))


def test_a_million_healthy_tokens_pass_although_the_largest_gap_is_far_out() -> None:
    """The most uncertain model computed in bfloat16, and one token beside itself."""
    gaps = _noise(0.13, 1_000_000)
    gaps[0] = 9.0
    steps = [_step(0, gaps)]
    assert gap_violations(steps, BFLOAT16) == []
    text = gap_text(steps, BFLOAT16)
    assert text.startswith(
        "1000000 tokens of the current version, trainer against engine: mean gap"
    )
    assert "99.9% within" in text
    assert "largest 9;" in text


def test_a_fault_that_most_tokens_do_not_show_breaks_the_quantile() -> None:
    """As positions one off in a policy of low entropy: one token in two hundred is far out."""
    gaps = _noise(0.01, 10_000)
    gaps[::200] = 5.0
    (violation,) = gap_violations([_step(0, gaps)], BFLOAT16)
    assert violation.startswith("all steps: 99.9% of gaps within")
    assert violation.endswith("limit 2")


def test_one_wrong_step_among_many_is_named() -> None:
    steps = [_step(n, _noise(0.01, 1000, seed=n)) for n in range(20)]
    assert gap_violations(steps, BFLOAT16) == []
    steps[7] = _step(7, _noise(0.5, 1000))
    assert gap_violations(steps, BFLOAT16) == ["step 7: mean gap 0.49 nats, limit 0.2"]


def test_a_step_of_few_tokens_is_not_judged_by_itself() -> None:
    steps = [_step(0, _noise(0.01, 10_000)), _step(1, np.array([0.01, 0.9]))]
    assert gap_violations(steps, BFLOAT16) == []


def test_steps_without_a_gap_are_counted_and_do_not_count_as_equal() -> None:
    steps = [_step(0, None), _step(1, _noise(1e-6, 500)), _step(2, None)]
    assert gap_violations(steps, LIMITS["float32"]) == []
    assert gap_text(steps, LIMITS["float32"]).endswith("2 of 3 steps had none")
    assert gap_violations(steps[:1], LIMITS["float32"]) == [
        "no token of the current version was compared, so nothing was measured"
    ]


def test_a_record_without_a_histogram_is_judged_by_its_largest_gap() -> None:
    old = _step(0, None)
    old = msgspec.structs.replace(old, metrics=metrics(logprob_gap_max=0.02))
    assert old.metrics.measured_gap() == LogprobGap(entries=50, mean=1e-6, max=0.02)
    assert gap_violations([old], LIMITS["float32"]) == [
        "all steps: 99.9% of gaps within 0.02 nats, limit 0.01"
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_runs_own_limits_go_before_those_of_its_dtype(dtype: str) -> None:
    made = configuration()
    made = msgspec.structs.replace(made, model=msgspec.structs.replace(made.model, dtype=dtype))
    assert limits_of(made) == LIMITS[dtype]
    own = msgspec.structs.replace(made, audit=Audit(logprob_gap_p999_max=3.5))
    assert limits_of(own) == (LIMITS[dtype].mean, 3.5)
    model = msgspec.structs.replace(own.model, engine_quantization="fp8_blocks")
    rounded = msgspec.structs.replace(own, model=model)
    assert limits_of(rounded) == (FP8_BLOCKS_LIMITS.mean, 3.5)
