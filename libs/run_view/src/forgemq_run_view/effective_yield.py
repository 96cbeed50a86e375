"""The effective training yield J = throughput x sample efficiency, by proxies, and its constraints.

Source: "The MiniMax-M2 Series", arXiv 2605.26494, section 6: maximise J with bounded variance of
the update and convergence. Neither is measured exactly there or here. The proxies:

    throughput          loss tokens trained per second of wall clock, after the first step
    sample efficiency   slope of the mean reward of training episodes over the samples consumed
                        before their weights, per 1,000 samples; a sample is one completion
    variance            sample variance of the gradient norms of the newest steps
    off-policyness      capped share and policy age of the newest steps
    convergence         that slope over the newest versions alone: near 0 once it has converged
"""

import math
from collections.abc import Sequence
from itertools import accumulate

from forgemq_run_view.state import EffectiveYield, StepPoint, VersionPoint

NEWEST = 10
"""Steps, and versions, that the constraints look at: few enough to see a change."""
PER_SAMPLES = 1000


def effective_yield(
    points: Sequence[StepPoint], versions: Sequence[VersionPoint]
) -> EffectiveYield:
    """J and what bounds it, of the steps so far.

    Args:
        points: Every surviving step, in order.
        versions: Results of training episodes by the version at admission, in order.

    Example: steps of 100 tokens and 50 samples a second apart, rewards of 0.1, 0.2, 0.3 under
    versions 0, 1, 2: 100 tokens/s x 2 reward per 1,000 samples = 200.
    """
    consumed = _consumed(points)
    measured = [
        (consumed[version.version] / PER_SAMPLES, version.tally.reward, version.tally.episodes)
        for version in versions
        if version.version in consumed and version.tally.episodes
    ]
    tokens_per_s, gain = _tokens_per_s(points), _slope(measured)
    newest = points[-NEWEST:]
    return EffectiveYield(
        value=None if tokens_per_s is None or gain is None else tokens_per_s * gain,
        tokens_per_s=tokens_per_s,
        reward_gain=gain,
        samples=sum(point.samples for point in points),
        reward_slope=_slope(measured[-NEWEST:]),
        grad_norm_variance=_variance([p.grad_norm for p in newest if p.grad_norm]),
        capped_share=_mean([(p.capped_share, p.loss_tokens) for p in newest]),
        policy_age_steps=_mean(
            [(p.policy_age, p.loss_tokens) for p in newest if p.policy_age is not None]
        ),
        newest_steps=len(newest),
    )


def _consumed(points: Sequence[StepPoint]) -> dict[int, int]:
    """Samples that were consumed before each version: step k makes version k + 1 of k."""
    totals = accumulate((point.samples for point in points), initial=0)
    first = points[0].step if points else 0
    return {first + index: total for index, total in enumerate(totals)}


def _tokens_per_s(points: Sequence[StepPoint]) -> float | None:
    """Without the first step, whose tokens were sampled before there was a time to count from."""
    if len(points) < 2 or points[-1].time_ms <= points[0].time_ms:
        return None
    seconds = (points[-1].time_ms - points[0].time_ms) / 1000
    return sum(point.loss_tokens for point in points[1:]) / seconds


def _slope(measured: Sequence[tuple[float, float, int]]) -> float | None:
    """Least squares of (x, y, weight); None if there is only one x."""
    weight = math.fsum(w for _, _, w in measured)
    if not weight:
        return None
    x_mean = math.fsum(w * x for x, _, w in measured) / weight
    y_mean = math.fsum(w * y for _, y, w in measured) / weight
    spread = math.fsum(w * (x - x_mean) ** 2 for x, _, w in measured)
    if not spread:
        return None
    return math.fsum(w * (x - x_mean) * (y - y_mean) for x, y, w in measured) / spread


def _variance(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _mean(weighted: Sequence[tuple[float, int]]) -> float | None:
    weight = sum(w for _, w in weighted)
    return math.fsum(value * w for value, w in weighted) / weight if weight else None
