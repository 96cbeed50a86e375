"""Whether engine and trainer agree as far as rounding allows: G5 on a run.

Judged are a mean and a quantile, over all tokens that were compared, and the mean of each step: the
largest of a million gaps says how many tokens there were, not whether something is wrong.

The limits lie between what rounding and what faults give. Computed with models in bfloat16 whose
attention ran in two kernels: the demo's has a mean of 0.002 nats and 99.9 % of its tokens within
0.15; a random one of 48 layers and an entropy of 4.4 nats, worse than any trained one, 0.13 and
0.63. Others report means of 0.06 (a mixture of experts, verl-omni #637) and assert 0.09 (dense
models, SkyRL #1408). Faults, in the demo's model: one context token wrong or missing, or all
positions one off, give means of only 0.03 to 0.08, as most tokens are near certain, but 99.9 %
within 5 to 9 nats; a projection that was not loaded 0.15 and 9. In float32 a run of the demo has
4e-7 and 1e-5.
"""

from collections.abc import Sequence
from typing import NamedTuple

from forgemq_contracts.gaps import LogprobGap, merged_gap
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.steps import TrainedStep

SHARE = 0.999
"""Of the tokens are within the quantile. One token in a thousand is what a fault shows in first."""

STEP_ENTRIES_MIN = 100
"""A step is judged by itself from so many tokens on: one unlucky token hardly moves their mean."""


class GapLimits(NamedTuple):
    """The largest gaps that rounding explains, nats."""

    mean: float
    p999: float


LIMITS = {"float32": GapLimits(1e-3, 1e-2), "bfloat16": GapLimits(0.2, 2.0)}
FP8_BLOCKS_LIMITS = GapLimits(0.2, 3.0)
"""Of engines that hold projections as 8-bit floats in blocks, whatever the trainer's dtype."""


def limits_of(configuration: RunConfiguration) -> GapLimits:
    """The run's own limits; by its model's dtype and its engines' format what it does not set."""
    model, own = configuration.model, configuration.audit
    usual = LIMITS[model.dtype] if model.engine_quantization == "none" else FP8_BLOCKS_LIMITS
    return GapLimits(
        usual.mean if own.logprob_gap_mean_max is None else own.logprob_gap_mean_max,
        usual.p999 if own.logprob_gap_p999_max is None else own.logprob_gap_p999_max,
    )


def gap_violations(steps: Sequence[TrainedStep], limits: GapLimits) -> list[str]:
    """What is above a limit, over all steps and in each of them."""
    gap = _gap(steps)
    if gap is None:
        return ["no token of the current version was compared, so nothing was measured"]
    wrong = _above("all steps", gap.mean, limits.mean, "mean gap")
    wrong += _above("all steps", gap.quantile(SHARE), limits.p999, f"{SHARE:.1%} of gaps within")
    for step in steps:
        own = step.metrics.measured_gap()
        if own is not None and own.entries >= STEP_ENTRIES_MIN:
            wrong += _above(f"step {step.step}", own.mean, limits.mean, "mean gap")
    return wrong


def gap_text(steps: Sequence[TrainedStep], limits: GapLimits) -> str:
    """What was compared and found, for the verdict's line."""
    gap = _gap(steps)
    if gap is None:
        return "0 tokens of the current version compared"
    unmeasured = sum(step.metrics.measured_gap() is None for step in steps)
    return (
        f"{gap.entries} tokens of the current version, trainer against engine: mean gap "
        f"{gap.mean:.2g} nats (limit {limits.mean:g}), {SHARE:.1%} within "
        f"{gap.quantile(SHARE):.2g} (limit {limits.p999:g}), largest {gap.max:.2g}; "
        f"{unmeasured} of {len(steps)} steps had none"
    )


def _gap(steps: Sequence[TrainedStep]) -> LogprobGap | None:
    return merged_gap(gap for step in steps if (gap := step.metrics.measured_gap()) is not None)


def _above(place: str, value: float, limit: float, what: str) -> list[str]:
    return [] if value <= limit else [f"{place}: {what} {value:.2g} nats, limit {limit:g}"]
