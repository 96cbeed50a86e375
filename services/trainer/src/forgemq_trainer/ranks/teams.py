"""Process groups of the teams that run groups of a step side by side, made once at the start."""

from datetime import timedelta

import torch.distributed as dist

from forgemq_trainer.core.assignment import team_ranks
from forgemq_trainer.core.attention.plan import Range
from forgemq_trainer.ranks.rank_group import RankGroup


class TeamGroups:
    """A process group for each team that this rank may be in."""

    def __init__(self, everyone: RankGroup, *, timeout: timedelta) -> None:
        """Make the groups; collective.

        Args:
            everyone: The group of all ranks, which is the team of all.
            timeout: How long a rank waits for another.
        """
        whole = (0, everyone.world_size)
        self._groups: dict[Range, RankGroup] = {whole: everyone}
        # Every rank makes all of them, in one order, also those that it is not in.
        for ranks in team_ranks(everyone.world_size):
            if ranks == whole:
                continue
            group = dist.new_group(list(range(*ranks)), timeout=timeout)
            if isinstance(group, dist.ProcessGroup):  # Else this rank is no member.
                size = ranks[1] - ranks[0]
                self._groups[ranks] = RankGroup(everyone.rank - ranks[0], size, group)

    def team(self, ranks: Range) -> RankGroup:
        """The ranks of a team that this rank is in, of at least two ranks."""
        return self._groups[ranks]
