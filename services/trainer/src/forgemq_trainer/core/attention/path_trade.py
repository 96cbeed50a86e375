"""Which keys the ranks of a team have to hand one another so that each has its own queries' paths.

A team cuts each block of a layout into one range of queries for each of its ranks. A rank computes
the keys of its own range, and its queries see those and the ancestors of the range's first token,
its path. Keys of the path that other ranks computed are handed over, and their gradients back.

Going forward, of a range's path

- what lies before the rank's own range of the previous block is live since then;
- what lies in the rest of the previous block is handed over before this block runs;
- what lies in this block is computed in this block's own pass, and is handed over layer by layer.

Example: a chain of 12 tokens in blocks [0, 6) and [6, 12), on two ranks with 3 tokens of each. In
the second block rank 0 runs [6, 9). It had [0, 3) itself and gets [3, 6) before. Rank 1 runs
[9, 12): its path had [0, 3) live, its own [3, 6) moves there, and it gets [6, 9) within.

`core.path_counts` counts these tokens, where the planner needs no more than their number.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forgemq_trainer.core.attention.plan import Range
from forgemq_trainer.core.paths import path_of
from forgemq_trainer.core.tree import Forest, Integers


@dataclass(frozen=True, slots=True)
class Trade:
    """The tokens, by layout index, whose keys this rank hands to each rank and gets from each.

    Attributes:
        given: For each rank of the team, own tokens that it needs.
        taken: For each rank of the team, its tokens that this rank needs.
        is_empty: True if no rank of the team needs any.
    """

    given: tuple[Integers, ...]
    taken: tuple[Integers, ...]
    is_empty: bool


class TeamPaths:
    """The paths of all ranges of a team, from one of its ranks; a rank alone trades nothing."""

    def __init__(self, forest: Forest, blocks: Sequence[Sequence[Range]], *, rank: int) -> None:
        """Look at each block's ranges, which are in the order of the ranks."""
        self._forest = forest
        self._blocks = blocks
        self._rank = rank
        self._starts = np.array([start for ranges in blocks for start, _ in ranges])

    def own(self, number: int) -> Range:
        """This rank's range of a block."""
        return self._blocks[number][self._rank]

    def path(self, number: int) -> Integers:
        """The ancestors of this rank's range of a block."""
        return path_of(self._forest, self.own(number)[0])

    def stored(self) -> Integers:
        """Own tokens that lie on the path of a range and are not in the last block.

        Those are on the path of the next range, which begins where their own ends.
        """
        end_N = self._forest.subtree_end_N
        own = [ranges[self._rank] for ranges in self._blocks[:-1]]
        found = [start + np.flatnonzero(end_N[start:end] > end) for start, end in own]
        return np.concatenate([*found, np.zeros(0, dtype=np.int64)])

    def before(self, number: int) -> Trade:
        """What is handed over between the forward of the previous block and of this one."""
        return self._trade(self._needed_before(number))

    def within(self, number: int) -> Trade:
        """What is handed over layer by layer while this block runs."""
        return self._trade(self._needed_within(number))

    def back(self, number: int) -> Trade:
        """What is handed over between the backward of the next block and of this one."""
        return self._trade(self._needed_back(number))

    def shared(self, number: int, rank: int | None = None) -> int:
        """How many tokens a rank's paths of this block and the next have in common.

        They are the root and what follows it: an ancestor of the next range that lies before this
        range is this one's ancestor too.
        """
        rank = self._rank if rank is None else rank
        later = path_of(self._forest, self._blocks[number + 1][rank][0])
        return int(np.searchsorted(later, self._blocks[number][rank][0]))

    def _needed_before(self, number: int) -> list[Integers]:
        start = self._blocks[number][0][0]
        return [
            self._part(number, rank, start=own, end=start)
            for rank, (own, _) in enumerate(self._blocks[number - 1])
        ]

    def _needed_within(self, number: int) -> list[Integers]:
        ranges = self._blocks[number]
        return [
            self._part(number, rank, start=ranges[0][0], end=start)
            for rank, (start, _) in enumerate(ranges)
        ]

    def _needed_back(self, number: int) -> list[Integers]:
        return [
            path_of(self._forest, start)[self.shared(number, rank) :]
            for rank, (start, _) in enumerate(self._blocks[number])
        ]

    def _part(self, number: int, rank: int, *, start: int, end: int) -> Integers:
        path = path_of(self._forest, self._blocks[number][rank][0])
        return np.asarray(path[np.searchsorted(path, start) : np.searchsorted(path, end)])

    def _trade(self, needed: Sequence[Integers]) -> Trade:
        """Each rank's needed tokens, by the rank that computed them; its own are no trade."""
        owners = [self._owner(tokens) for tokens in needed]
        mine = self._rank

        def of(needs: int, owns: int) -> Integers:
            if needs == owns:
                return np.zeros(0, dtype=np.int64)
            return np.asarray(needed[needs][owners[needs] == owns])

        ranks = range(len(needed))
        return Trade(
            given=tuple(of(rank, mine) for rank in ranks),
            taken=tuple(of(mine, rank) for rank in ranks),
            is_empty=all((owners[rank] == rank).all() for rank in ranks),
        )

    def _owner(self, tokens: Integers) -> Integers:
        size = len(self._blocks[0])
        return np.asarray((np.searchsorted(self._starts, tokens, side="right") - 1) % size)
