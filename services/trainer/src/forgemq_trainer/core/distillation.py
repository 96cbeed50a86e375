"""Advantages of on-policy distillation: what a teacher would have sampled counts for more.

A token's advantage gets weight * (log p teacher - log p behaviour), both at the sampled token. In
expectation over the policy's samples that is minus the gradient of the reverse KL divergence,
KL(policy || teacher), of each token given its context; what a token does to later contexts is not
credited to it. Source: Thinking Machines, "On-Policy Distillation", 2025. Differs: the difference
is bounded, and adds to an advantage from rewards. MiniLLM (arXiv 2306.08543) credits later tokens
too; GKD (arXiv 2306.13649) compares whole distributions.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from forgemq_contracts.distillation import Distillation
from forgemq_trainer.core.tree import Floats, Forest, InvalidTreeError

DIFFERENCE_NATS_MAX = 10.0
"""By size: beyond it one token that a teacher finds impossible would take over the step's clipped
gradient, as with the KL to a reference (`core.loss.KL_MAX`)."""


def distilled(forest: Forest, settings: Distillation | None) -> Forest:
    """The forest with advantages from rewards and teacher; as it is without a teacher.

    Raises:
        InvalidTreeError: an entry has no log-probability of the teacher.
    """
    if settings is None:
        return forest
    if np.isnan(forest.entry_teacher_E).any():
        raise InvalidTreeError("entry_teacher_logprob: the teacher did not answer for its tokens")
    difference_E = np.clip(_differences(forest), -DIFFERENCE_NATS_MAX, DIFFERENCE_NATS_MAX)
    return replace(
        forest,
        entry_advantage_E=settings.reward_weight * forest.entry_advantage_E
        + settings.weight * difference_E,
    )


def kl_teacher(forests: Sequence[Forest]) -> float:
    """Mean of log p behaviour - log p teacher over all entries, nats; 0 without a teacher."""
    differences = [_differences(forest) for forest in forests]
    all_E = np.concatenate([*differences, np.zeros(0)])
    known_E = all_E[~np.isnan(all_E)]
    return float(-known_E.mean()) if len(known_E) else 0.0


def _differences(forest: Forest) -> Floats:
    return np.asarray(forest.entry_teacher_E - forest.entry_logprob_E)
