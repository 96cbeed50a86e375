"""Log-probabilities under a reference policy: one forward more over the same trees."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from forgemq_trainer.core.forward import Policy, TreeForward
from forgemq_trainer.core.memory import Microbatch
from forgemq_trainer.core.tree import Floats, Forest, joined


def with_references(
    reference: Policy,
    forests: Sequence[Forest],
    microbatches: Sequence[Microbatch],
    *,
    head_chunk: int,
) -> tuple[Forest, ...]:
    """The forests with a reference of every entry; those that came with the tree stay.

    A mixture of experts routes each token as the reference does: no route is replayed.

    Args:
        reference: a model of the same vocabulary.
        forests: of the step.
        microbatches: of the step, which say what fits.
        head_chunk: rows of logits at once.
    """
    filled = list(forests)
    for microbatch in microbatches:
        groups = [_without_routes(forests[group]) for group in microbatch.groups]
        forest = joined(groups)
        read_E = _logprobs(reference, forest, microbatch, head_chunk=head_chunk)
        for place, group in enumerate(microbatch.groups):
            own_E, known_E = read_E[forest.entry_group_E == place], groups[place].entry_reference_E
            reference_E = np.where(np.isnan(known_E), own_E, known_E)
            filled[group] = replace(forests[group], entry_reference_E=reference_E)
    return tuple(filled)


def _logprobs(policy: Policy, forest: Forest, microbatch: Microbatch, *, head_chunk: int) -> Floats:
    forward = TreeForward(policy, forest, head_chunk=head_chunk)
    edges = [forward.edges(start, end) for start, end in microbatch.blocks]
    keys = forward.path_keys(microbatch.blocks, is_offloaded=microbatch.is_offloaded)
    logprob_E, _ = forward.read(microbatch.blocks, edges, keys)
    return np.asarray(logprob_E.double().cpu().numpy())


def _without_routes(forest: Forest) -> Forest:
    return replace(forest, entry_route_ER=np.zeros((forest.entry_count, 0), dtype=np.int16))
