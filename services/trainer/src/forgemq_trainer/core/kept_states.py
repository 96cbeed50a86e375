"""Final hidden states of a forest's tokens, kept from one pass over them for a draft head's.

A rank alone keeps those of all tokens. A rank of a team has those of its own ranges, and its
tokens' parents may lie in the ranges of others: `share` hands their states over. A parent that lies
before a range is an ancestor of the range's first token, so these are few.

N tokens of a layout, T tokens of a run, U kept tokens, C handed over, H hidden size.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from forgemq_trainer.core.attention.carry import LayoutRun, MakeStore
from forgemq_trainer.core.attention.plan import Range
from forgemq_trainer.core.tree import Forest, Integers


class KeptStates:
    """The states of one pass over a layout, without gradient.

    If one process runs the layout at once they stay where they are. Otherwise they lie in a store
    outside the memory budget.

    Lifecycle: `keep` of every block of a pass, then `share`, then `of`.
    """

    def __init__(
        self,
        forest: Forest,
        run: LayoutRun,
        *,
        hidden: int,
        dtype: torch.dtype,
        make_store: MakeStore,
    ) -> None:
        """Make room.

        Args:
            forest: Of the layout.
            run: How this process runs it.
            hidden: H.
            dtype: Of the states.
            make_store: Allocates the store.
        """
        self._runs_twice = len(run.blocks) > 1
        self._team = run.team
        ranges = () if run.team is None else run.team.ranges
        self._handed = handed_over(forest.parent_N, ranges)
        self._place_N = _places(forest, run.blocks, self._handed)
        self._states_UH: Tensor | None = None
        if not run.is_whole:
            count = int(self._place_N.max()) + 1
            self._states_UH = make_store((count, hidden), dtype)
        self._is_stored = self._states_UH is not None
        own_count = sum(end - start for start, end in run.blocks)
        self._is_own_C = self._place_N[self._handed] < own_count
        self._roots = np.flatnonzero((forest.parent_N < 0) & (self._place_N >= 0))

    @property
    def is_empty(self) -> bool:
        """True if no pass ran."""
        return self._states_UH is None

    def keep(self, start: int, end: int, state_TH: Tensor) -> None:
        """Keep the states of the tokens [start, end), which are one block."""
        if not self._is_stored:
            self._states_UH = state_TH.detach()
        # The second time blocks run, with gradient, their states are the same.
        elif not (self._runs_twice and state_TH.requires_grad):
            self.of_block(start, end).copy_(state_TH.detach())

    def take_roots(self, others: "KeptStates") -> None:
        """Replace the states of roots by those of the same layout's other states."""
        places = torch.from_numpy(self._place_N[self._roots])
        self._stored[places.to(self._stored.device)] = others.of(self._roots)

    def share(self, device: torch.device) -> None:
        """Hand over the states that other ranks read; every rank of a team calls it, or none.

        Args:
            device: That ranks exchange on.
        """
        if self._team is None or not len(self._handed):
            return
        wide = torch.promote_types(self._stored.dtype, torch.float32)
        size = len(self._handed), self._stored.shape[1]
        given_CH = torch.zeros(size, dtype=wide, device=device)
        own = torch.from_numpy(self._is_own_C).to(device)
        given_CH[own] = self.of(self._handed[self._is_own_C]).to(device, wide)
        # Each state is on one rank and 0 on the others, so their sum is that state.
        shared_CH = self._team.peers.all_reduce(given_CH)
        places = torch.from_numpy(self._place_N[self._handed]).to(self._stored.device)
        self._stored[places] = shared_CH.to(self._stored.device, self._stored.dtype)

    def of(self, tokens: Integers) -> Tensor:
        """The states of these tokens, by layout index, in the memory that holds them."""
        places = torch.from_numpy(self._place_N[tokens]).to(self._stored.device)
        return self._stored.index_select(0, places)

    def of_block(self, start: int, end: int) -> Tensor:
        """The states of a block's tokens [start, end); shares memory with what is kept."""
        place = int(self._place_N[start])
        return self._stored[place : place + end - start]

    @property
    def _stored(self) -> Tensor:
        assert self._states_UH is not None, "no pass ran"
        return self._states_UH


def handed_over(parent_N: Integers, blocks: Sequence[Sequence[Range]]) -> Integers:
    """Parents of tokens that another rank runs, of the whole layout, ascending.

    Args:
        parent_N: Of each token of the layout; below 0 for a root.
        blocks: The ranks' ranges of each block; none if one rank runs all.
    """
    rank_N = np.zeros(len(parent_N), dtype=np.int64)
    for ranges in blocks:
        for rank, (start, end) in enumerate(ranges):
            rank_N[start:end] = rank
    is_apart_N = (parent_N >= 0) & (rank_N[parent_N] != rank_N)
    return np.asarray(np.unique(parent_N[is_apart_N]), dtype=np.int64)


def _places(forest: Forest, blocks: Sequence[Range], handed: Integers) -> Integers:
    """Where each token's state is kept, own ones first; -1 if it is not."""
    place_N = np.full(forest.token_count, -1, dtype=np.int64)
    count = 0
    for start, end in blocks:
        place_N[start:end] = np.arange(count, count + end - start)
        count += end - start
    others = handed[place_N[handed] < 0]
    place_N[others] = np.arange(count, count + len(others))
    return place_N
