"""Ranks that compute together: what each gives the others, and gets from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

RankLists: TypeAlias = Sequence[Sequence[int]]


class PendingTensor:
    """A tensor that ranks are filling, beside what this one computes."""

    def __init__(self, tensor: Tensor, work: dist.Work | None, *, source: Tensor) -> None:
        """Hold what is filled, and what it is filled from, until the result is taken."""
        self._tensor, self._work = tensor, work
        self._source: Tensor | None = source

    def result(self) -> Tensor:
        """The tensor, filled; on a GPU what is computed next waits for it, not this thread."""
        if self._work is not None:
            self._work.wait()
        self._work = self._source = None
        return self._tensor


@dataclass(frozen=True, slots=True)
class RankGroup:
    """This rank in a group; all ranks of it make the same calls in one order.

    Implements `core.attention.exchange.Peers` and `core.spread_experts.ExpertPeers`.

    Attributes:
        rank: This one's number in the group, from 0.
        world_size: Of the group.
        group: Of torch.
    """

    rank: int
    world_size: int
    group: dist.ProcessGroup

    def all_gather(self, own: Tensor) -> list[Tensor]:
        """Gather `own` of every rank, by rank; all have one shape."""
        own = own.contiguous()
        everyones = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(everyones, own, group=self.group)
        return everyones

    def begin_all_gather(self, own: Tensor) -> PendingTensor:
        """Begin to gather the rows of every rank, by rank; all have one shape."""
        own = own.contiguous()
        whole = own.new_empty((self.world_size * len(own), *own.shape[1:]))
        work = dist.all_gather_single(whole, own, group=self.group, async_op=True)
        return PendingTensor(whole, work, source=own)

    def begin_reduce_scatter(self, whole: Tensor) -> PendingTensor:
        """Begin to sum this rank's rows over the ranks; `whole` has as many rows for each rank."""
        whole = whole.contiguous()
        own = whole.new_empty((len(whole) // self.world_size, *whole.shape[1:]))
        work = dist.reduce_scatter_single(own, whole, group=self.group, async_op=True)
        return PendingTensor(own, work, source=whole)

    def all_reduce(self, own: Tensor) -> Tensor:
        """Sum of `own` over the ranks."""
        summed = own.detach().clone()
        dist.all_reduce(summed, group=self.group)
        return summed

    def swap(self, own: Tensor, *, given: Sequence[int], taken: Sequence[int]) -> Tensor:
        """Give each rank its rows of `own`; returns those that each rank gave to this one."""
        result = own.new_empty((sum(taken), *own.shape[1:]))
        dist.all_to_all_single(result, own.contiguous(), list(taken), list(given), group=self.group)
        return result


def own_group(all_ranks: RankLists, *, rank: int, timeout: timedelta) -> RankGroup:
    """Make a group of each of these lists of ranks; returns the one with this rank.

    Every rank calls it, with the same lists, each of which has other ranks.
    """
    # Every rank makes all of them, in one order, also those that it is not in.
    groups = [dist.new_group(list(ranks), timeout=timeout) for ranks in all_ranks]
    (own,) = (pair for pair in zip(groups, all_ranks, strict=True) if rank in pair[1])
    group, ranks = own
    assert isinstance(group, dist.ProcessGroup)
    return RankGroup(rank=ranks.index(rank), world_size=len(ranks), group=group)
