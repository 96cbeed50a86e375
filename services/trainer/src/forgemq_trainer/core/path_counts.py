"""How many keys the ranks of a team store and hand over, counted without listing them.

A layout is cut into ranges, and the ancestors of a range's first token are its path. Of a path, as
many tokens lie before a token x of the layout as the least depth between x and the path's end: an
ancestor that lies before x is an ancestor of all tokens in between. So the counts need two numbers
of each range: its first token's depth, and the least depth of its tokens.

Example: a root R of 4 tokens with children A and B of 3 each, cut into R, A and B, whose first
tokens have depths 0, 4 and 4. The least depth between A's first token and B's is 4: all four
tokens of B's path lie before A. Between R's and B's it is 0: none lies before R.

`attention.path_trade` lists the tokens that are counted here.

N tokens of a layout, K blocks of it, R ranks of a team.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forgemq_trainer.core.attention.plan import Range
from forgemq_trainer.core.tree import Integers

_UNSEEN = np.iinfo(np.int64).max
"""Least depth of no tokens."""


@dataclass(frozen=True, slots=True)
class PathCounts:
    """Of the ranges of a team's ranks in all blocks of a layout, in order.

    Attributes:
        depth_KR: Of the first token of each range, which is the length of its path.
        least_KR: Least depth of the tokens of each range.
    """

    depth_KR: Integers
    least_KR: Integers

    def traded(self) -> int:
        """The most tokens whose keys a rank hands over and gets while a block runs."""
        within_KRR = self._within()
        return int((within_KRR.sum(axis=1) + within_KRR.sum(axis=2)).max())

    def stored(self) -> int:
        """The most tokens of one rank that lie on a later path, those of the last block apart."""
        blocks, ranks = self.depth_KR.shape
        # A token on a later path is on that of the next range too.
        next_depth = self.depth_KR.reshape(-1)[1:]
        count = np.maximum(next_depth - self.least_KR.reshape(-1)[:-1], 0)
        of_rank_R = count[: (blocks - 1) * ranks].reshape(-1, ranks).sum(axis=0)
        return int(of_rank_R.max())

    def handed_over(self, *, is_trained: bool) -> tuple[Integers, Integers]:
        """Of each rank, tokens whose keys it hands over, and whose gradients it gives back.

        Without a backward only what is handed over in the forward counts.
        """
        forward_RR = self._within().sum(axis=0) + self._before()
        back_RR = self._back() if is_trained else np.zeros_like(forward_RR)
        keys_R = (forward_RR + back_RR).sum(axis=0)
        return keys_R, forward_RR.sum(axis=1) * is_trained

    def _within(self) -> Integers:
        """Of each block, for each rank (rows), own tokens of each rank (columns) on its path."""
        return np.diff(self._above(), axis=2, append=self.depth_KR[:, :, None])

    def _above(self) -> Integers:
        """Of each block, how much of each rank's path (rows) lies before each range (columns).

        Before ranges that begin where the path ends, or later, lies all of it.
        """
        ranks = self.depth_KR.shape[1]
        is_before_RR = np.tri(ranks, k=-1, dtype=np.bool_)
        least_KRR = np.where(is_before_RR, self.least_KR[:, None, :], self.depth_KR[:, :, None])
        return _least_from_here(least_KRR)

    def _before(self) -> Integers:
        """The same of what a rank gets before a block, summed over the blocks.

        That is what lies behind the rank's own range of the previous block, but before this block.
        """
        ranks = self.depth_KR.shape[1]
        from_here_KR = _least_from_here(self.least_KR)[:-1]
        bounds = np.append(from_here_KR, np.full((len(from_here_KR), 1), _UNSEEN), axis=1)
        above_KRR = np.minimum(bounds[:, None, :], self._above()[1:, :, :1])
        is_behind_RR = ~np.tri(ranks, dtype=np.bool_)
        return np.asarray((np.diff(above_KRR, axis=2) * is_behind_RR).sum(axis=0))

    def _back(self) -> Integers:
        """The same of what a rank gets back before the backward of a block that others follow.

        That is what of its path is not on the path of its range of the next block.
        """
        blocks, ranks = self.depth_KR.shape
        above_KRR, here_KR = self._above(), _least_from_here(self.least_KR)
        found_RR = np.zeros((ranks, ranks), dtype=np.int64)
        for block in range(blocks - 1):
            shared_R = np.minimum(here_KR[block], above_KRR[block + 1, :, 0])
            earlier = _least_from_here(self.least_KR[:block].reshape(-1))
            # Ranges before this block's have nothing that is not shared.
            first = max(0, int(np.searchsorted(earlier, shared_R.min(), side="right")) - 1)
            first = first // ranks * ranks
            bounds = np.minimum(earlier[None, first:], above_KRR[block, :, :1])
            bounds = np.concatenate([bounds, above_KRR[block], self.depth_KR[block, :, None]], 1)
            counts = np.diff(np.maximum(bounds, shared_R[:, None]), axis=1)
            found_RR += counts.reshape(ranks, -1, ranks).sum(axis=1)
        np.fill_diagonal(found_RR, 0)
        return found_RR


def path_counts(position_N: Integers, blocks: Sequence[Sequence[Range]]) -> PathCounts:
    """Of the ranges of each block of a layout whose tokens have these depths."""
    starts = np.array([[start for start, _ in ranges] for ranges in blocks])
    least = np.minimum.reduceat(position_N, starts.reshape(-1))
    return PathCounts(position_N[starts], least.reshape(starts.shape))


def _least_from_here(values: Integers) -> Integers:
    """The least of each value and those behind it, along the last axis."""
    return np.asarray(np.minimum.accumulate(values[..., ::-1], axis=-1)[..., ::-1])
