"""Which tokens lie on the paths from the roots to given tokens.

N tokens, M segments.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence

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


def path_ranges(forest: Forest, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges that together have every ancestor of at least one of the tokens once.

    An ancestor of a token that lies before the PREVIOUS token is that one's ancestor too, so each
    token adds only its ancestors from the previous one on.

    Args:
        forest: Whose tokens they are.
        tokens: Layout indices, ascending.
    """
    first_M, parent_M = forest.segment_start_M.tolist(), forest.segment_parent_M.tolist()
    previous = 0
    for token in tokens:
        above = int(forest.parent_N[token])
        segment = bisect_right(first_M, above) - 1
        while above >= previous:
            yield max(first_M[segment], previous), above + 1
            above, segment = int(forest.parent_N[first_M[segment]]), parent_M[segment]
        previous = token
