"""Log-probabilities under a reference policy: a further forward over the same trees."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

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
    filled = list(forests)
    for microbatch in microbatches:
        groups = [_without_expert_routes(forests[group]) for group in microbatch.groups]
        forest = joined(groups)
        read_E = read_logprobs(reference, forest, microbatch, head_chunk=head_chunk)
        for index, group in enumerate(microbatch.groups):
            own_E, known_E = read_E[forest.entry_group_E == index], groups[index].entry_reference_E
            reference_E = np.where(np.isnan(known_E), own_E, known_E)
            filled[group] = replace(forests[group], entry_reference_E=reference_E)
    return tuple(filled)


def read_logprobs(
    policy: PolicyModel, forest: Forest, microbatch: Microbatch, *, head_chunk: int
) -> Floats:
    """Log-probability of each entry under the policy, nats; no gradient is computed."""
    forward = TreeForward(policy, forest, head_chunk=head_chunk)
    edges = [forward.edges(start, end) for start, end in microbatch.blocks]
    keys = forward.path_keys(microbatch.blocks, is_offloaded=microbatch.is_offloaded)
    logprob_E, _ = forward.read(microbatch.blocks, edges, keys)
    return np.asarray(logprob_E.double().cpu().numpy())


def _without_expert_routes(forest: Forest) -> Forest:
    return replace(forest, entry_route_ER=np.zeros((forest.entry_count, 0), dtype=np.int16))
