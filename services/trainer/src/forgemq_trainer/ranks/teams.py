"""Process groups of the teams that run groups of a step side by side, made once at the start."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from forgemq_trainer.core.assignment import team_ranks
from forgemq_trainer.core.attention.plan import Range


@dataclass(frozen=True, slots=True)
class TeamPeers:
    """This rank in a team. Implements `core.attention.exchange.Peers`."""

    rank: int
    group: dist.ProcessGroup

    def swap(self, own: Tensor, *, given: Sequence[int], taken: Sequence[int]) -> Tensor:
        """Give each rank its rows of `own`; returns those that each rank gave to this one."""
        result = own.new_empty((sum(taken), *own.shape[1:]))
        dist.all_to_all_single(result, own, list(taken), list(given), group=self.group)
        return result

    def all_reduce(self, own: Tensor) -> Tensor:
        """Sum of `own` over the team."""
        summed = own.detach().clone()
        dist.all_reduce(summed, group=self.group)
        return summed


class TeamGroups:
    """A process group for each team that this rank may be in."""

    def __init__(self, *, rank: int, everyone: dist.ProcessGroup, timeout: timedelta) -> None:
        """Make the groups; collective.

        Args:
            rank: This one.
            everyone: The group of all ranks, which is the team of all.
            timeout: How long a rank waits for another.
        """
        self._rank = rank
        world_size = dist.get_world_size(everyone)
        self._groups: dict[Range, dist.ProcessGroup] = {}
        # Every rank makes all of them, in one order, also those that it is not in.
        for ranks in team_ranks(world_size):
            members = list(range(*ranks))
            is_everyone = len(members) == world_size
            group = everyone if is_everyone else dist.new_group(members, timeout=timeout)
            if isinstance(group, dist.ProcessGroup):  # Else this rank is no member.
                self._groups[ranks] = group

    def team(self, ranks: Range) -> TeamPeers:
        """The ranks of a team that this rank is in, of at least two ranks."""
        return TeamPeers(self._rank - ranks[0], self._groups[ranks])
