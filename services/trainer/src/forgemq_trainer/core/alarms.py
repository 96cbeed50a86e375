"""Compares a step's metrics with thresholds that a healthy run stays below."""

from dataclasses import dataclass

from forgemq_contracts.steps import Alarm, TrainingMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The largest values without an alarm; 0 turns an alarm off.

    Attributes:
        logprob_gap_mean: Between engine and trainer on the same weights, nats; a step that did
            not measure it raises none.
        kl_k3: Between behaviour and policy, nats.
        ratio_p99: Of policy over behaviour probability.
        capped_share: Of entries that the loss limited, 0..1.
    """

    logprob_gap_mean: float
    kl_k3: float
    ratio_p99: float
    capped_share: float


def alarms(metrics: TrainingMetrics, thresholds: Thresholds) -> tuple[Alarm, ...]:
    """The alarms of a step, in a fixed order."""
    gap = metrics.measured_gap()
    rules = (
        ("logprob_gap_mean", gap.mean if gap else 0.0, thresholds.logprob_gap_mean),
        ("kl_k3", metrics.kl_k3, thresholds.kl_k3),
        ("ratio_p99", metrics.ratio_p99, thresholds.ratio_p99),
        ("capped_share", metrics.capped_share, thresholds.capped_share),
    )
    return tuple(
        Alarm(metric=metric, value=value, threshold=threshold)
        for metric, value, threshold in rules
        if 0 < threshold < value
    )
