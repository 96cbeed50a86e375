"""Log-probabilities without gradient: of a reference policy, and of the policy as it is."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from forgemq_trainer.core.forward import PolicyModel, TreeForward
from forgemq_trainer.core.memory import Microbatch
from forgemq_trainer.core.tree import Floats, Forest, joined


def with_references(
    reference: PolicyModel,
    forests: Sequence[Forest],
    microbatches: Sequence[Microbatch],
    *,
    head_chunk: int,
) -> tuple[Forest, ...]:
    """The forests with a reference log-probability for every entry; recorded ones stay.

    In a mixture of experts the reference's own routers choose; recorded expert routes are those of
    another model.

    Args:
        reference: A model of the same vocabulary.
        forests: One for each group of the step.
        microbatches: Of the step; each runs as the training forward does, in the same memory.
        head_chunk: Rows of logits that exist at once.
    """
    read = read_forests(reference, routeless(forests), microbatches, head_chunk=head_chunk)
    return filled(forests, read)


def routeless(forests: Sequence[Forest]) -> list[Forest]:
    """The forests as a reference reads them, without the expert routes of the policy's engine."""
    return [_without_expert_routes(forest) for forest in forests]


def filled(forests: Sequence[Forest], read: Sequence[Floats]) -> tuple[Forest, ...]:
    """The forests with what a reference read of them; recorded log-probabilities stay."""
    return tuple(
        replace(
            forest,
            entry_reference_E=np.where(
                np.isnan(forest.entry_reference_E), own_E, forest.entry_reference_E
            ),
        )
        for forest, own_E in zip(forests, read, strict=True)
    )


def read_forests(
    policy: PolicyModel,
    forests: Sequence[Forest],
    microbatches: Sequence[Microbatch],
    *,
    head_chunk: int,
) -> list[Floats]:
    """Log-probability of each entry of each forest, nats; NaN in forests of no microbatch.

    Args:
        policy: Its parameters get no gradients.
        forests: One for each group of the step.
        microbatches: Of the step; each runs as the training forward does, in the same memory.
        head_chunk: Rows of logits that exist at once.
    """
    read = [np.full(forest.entry_count, np.nan) for forest in forests]
    for microbatch in microbatches:
        forest = joined([forests[group] for group in microbatch.groups])
        read_E = read_logprobs(policy, forest, microbatch, head_chunk=head_chunk)
        for index, group in enumerate(microbatch.groups):
            read[group] = read_E[forest.entry_group_E == index]
    return read


def read_logprobs(
    policy: PolicyModel, forest: Forest, microbatch: Microbatch, *, head_chunk: int
) -> Floats:
    """Log-probability of each entry under the policy, nats; no gradient is computed."""
    forward = TreeForward(policy, forest, head_chunk=head_chunk)
    if len(microbatch.blocks) == 1:
        # Without carries, which may need more than a forest whose layers are recomputed.
        with torch.no_grad():
            logprob_E, _ = forward.whole()
        return np.asarray(logprob_E.double().cpu().numpy())
    edges = [forward.edges(start, end) for start, end in microbatch.blocks]
    keys = forward.path_keys(microbatch.blocks, is_offloaded=microbatch.is_offloaded)
    logprob_E, _ = forward.read(microbatch.blocks, edges, keys)
    return np.asarray(logprob_E.double().cpu().numpy())


def _without_expert_routes(forest: Forest) -> Forest:
    return replace(forest, entry_route_ER=np.zeros((forest.entry_count, 0), dtype=np.int16))
