"""Which tokens lie on the path from the root to a given token."""

import numpy as np

from forgemq_trainer.core.tree import Forest, Integers


def path_of(forest: Forest, token: int) -> Integers:
    """Layout indices of a token's ancestors, the root first."""
    ranges = []
    above = int(forest.parent_N[token])
    while above >= 0:
        segment = int(np.searchsorted(forest.segment_start_M, above, side="right")) - 1
        start = int(forest.segment_start_M[segment])
        ranges.append(np.arange(start, above + 1))
        above = int(forest.parent_N[start])
    return np.concatenate(ranges[::-1]) if ranges else np.zeros(0, dtype=np.int64)
