"""Compares a step's metrics with thresholds that a healthy run stays below."""

from dataclasses import dataclass

from forgemq_contracts.steps import TrainingMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The largest values without an alarm; 0 turns an alarm off.

    Attributes:
        logprob_gap_mean: Between engine and trainer on the same weights, nats.
        kl_k3: Between behaviour and policy, nats.
        ratio_p99: Of policy over behaviour probability.
        capped_share: Of entries that the loss limited, 0..1.
    """

    logprob_gap_mean: float
    kl_k3: float
    ratio_p99: float
    capped_share: float


@dataclass(frozen=True, slots=True)
class Alarm:
    """A metric above its threshold."""

    metric: str
    value: float
    threshold: float


def alarms(metrics: TrainingMetrics, thresholds: Thresholds) -> tuple[Alarm, ...]:
    """The alarms of a step, in a fixed order."""
    rules = (
        ("logprob_gap_mean", metrics.logprob_gap_mean, thresholds.logprob_gap_mean),
        ("kl_k3", metrics.kl_k3, thresholds.kl_k3),
        ("ratio_p99", metrics.ratio_p99, thresholds.ratio_p99),
        ("capped_share", metrics.capped_share, thresholds.capped_share),
    )
    return tuple(Alarm(*rule) for rule in rules if 0 < rule[2] < rule[1])
