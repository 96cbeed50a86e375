"""FLOPs of a draft head, which runs over the same trees as its policy; counted as in `flops`.

Each of its depths is a forward and a backward over all tokens:

    (4 F + 6 W) t + 14 Q p + 6 H V t

F weights of the projection, whose inputs have no gradient, W weights of the layer, t tokens, Q
query size, p pairs that attention visits, H width, V vocabulary. A token sees those between the
root of its tree and itself; a root sees itself. Of the language-model head there are the logits of
both, head and policy, and the gradient of the head's states. A group in blocks runs forward once
more, without the language-model head:

    2 (F + W) t + 4 Q p

N tokens.
"""

from dataclasses import dataclass

import numpy as np

from forgemq_trainer.core.draft_memory import DraftShape
from forgemq_trainer.core.tree import Integers


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFlops:
    """FLOPs of each token at all depths; whole numbers, as those of `token_flops`.

    Attributes:
        trained_N: Of a forward and backward.
        read_N: Of a forward alone.
    """

    trained_N: Integers
    read_N: Integers


def draft_flops(draft: DraftShape | None, position_N: Integers) -> DraftFlops:
    """Of tokens at these positions in their trees; 0 without a head."""
    if draft is None:
        zero_N = np.zeros_like(position_N)
        return DraftFlops(trained_N=zero_N, read_N=zero_N)
    projection, layer = draft.projection_weights, draft.layer_weights
    logits = draft.hidden * draft.vocabulary
    pairs_N = np.maximum(position_N, 1)
    trained_N = 4 * projection + 6 * (layer + logits) + 14 * draft.query_size * pairs_N
    read_N = 2 * (projection + layer) + 4 * draft.query_size * pairs_N
    return DraftFlops(trained_N=draft.depths * trained_N, read_N=draft.depths * read_N)
