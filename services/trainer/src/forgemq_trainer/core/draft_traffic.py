"""What the ranks of a team send one another for a draft head, which runs the team's groups too.

It hands over keys as the policy does, once for each of its depths, and the states that its rows
read of other ranks' tokens (`kept_states`), which are summed over the team.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from forgemq_trainer.core.attention.plan import Range
from forgemq_trainer.core.draft_memory import DraftShape
from forgemq_trainer.core.kept_states import handed_over
from forgemq_trainer.core.path_counts import path_counts
from forgemq_trainer.core.tree import Forest


def draft_bytes(
    draft: DraftShape, forests: Sequence[Forest], blocks: Sequence[Sequence[Range]]
) -> tuple[int, ...]:
    """Bytes that each rank sends in an update.

    Args:
        draft: The head's sizes.
        forests: Of the team's groups, in order.
        blocks: Of their layout, the ranks' ranges in each of them.
    """
    # To the head a root is a tree of its own.
    depth_N = np.concatenate([np.maximum(each.position_N - 1, 0) for each in forests])
    keys_R, gradients_R = path_counts(depth_N, blocks).handed_over(is_trained=True)
    of_value = keys_R * draft.value_bytes + gradients_R * draft.wide_bytes
    firsts = itertools.accumulate((each.token_count for each in forests), initial=0)
    parents = [
        np.where(each.parent_N < 0, -1, each.parent_N + first)
        for each, first in zip(forests, firsts, strict=False)
    ]
    states = len(handed_over(np.concatenate(parents), blocks))
    ranks = len(blocks[0])
    of_states = 2 * (states * draft.hidden * draft.wide_bytes * (ranks - 1) // ranks)
    sent_R = draft.depths * (2 * draft.key_size * of_value + of_states)
    return tuple(int(sent) for sent in sent_R)
