"""Whether the log-probabilities of an output are those of the whole distribution."""

from forgemq_contracts.completions import Constraint, Support
from forgemq_contracts.episodes import Sampling

GREEDY_BELOW = 1e-6
"""SGLang takes the most likely token at temperatures below this (its `_SAMPLING_EPS`)."""


def support_of(sampling: Sampling, *, constraint: Constraint | None = None) -> Support:
    """Full, or what makes the recorded log-probabilities unusable for training."""
    if constraint is not None:
        return "grammar"
    if sampling.temperature < GREEDY_BELOW:
        return "greedy"
    if sampling.frequency_penalty != 0 or sampling.presence_penalty != 0:
        return "penalty"
    if sampling.top_k > 0:
        return "top_k"
    return "top_p" if sampling.top_p < 1 else "full"
