"""Ranks that compute together: what each gives the others, and gets from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

RankLists: TypeAlias = Sequence[Sequence[int]]


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

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """Sum over the ranks of their `parts[this rank]`; all have one shape."""
        summed = torch.empty_like(parts[0])
        dist.reduce_scatter(summed, [part.contiguous() for part in parts], group=self.group)
        return summed

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
