"""How the ranks hold the model: replicas of it, each in shards over ranks that follow one another.

Example: with 8 ranks and 4 of them to a replica, ranks 0 to 3 hold the model once and ranks 4 to 7
once more. Ranks are numbered machine by machine, so a replica whose number of ranks divides that of
a machine gathers its parameters within that machine. Between machines go only summed gradients.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from forgemq_trainer.core.traffic import RankGrid
from forgemq_trainer.ranks.rank_group import RankGroup, own_group


class ShardMesh:
    """This rank's place among the replicas, and the groups that it sums and gathers in.

    Attributes:
        grid: How many ranks hold the model once, and how often they hold it.
        shard: This rank's shard, from 0.
        replica: This rank's replica, from 0.
        shards: The ranks of this replica.
        device_mesh: For FSDP; of two dimensions if there are several replicas.
        placements: Of a parameter in that mesh.
    """

    def __init__(
        self, grid: RankGrid, *, device_type: str, timeout: timedelta, exchange: RankGroup
    ) -> None:
        """Make the groups; every rank calls it.

        Args:
            grid: Of all ranks.
            device_type: That the parameters are on.
            timeout: How long a rank waits for another.
            exchange: The group in which all ranks compute together.
        """
        rank = exchange.rank
        self.grid = grid
        self.replica, self.shard = divmod(rank, grid.shards)
        ranks = torch.arange(grid.ranks).reshape(grid.replicas, grid.shards)
        self.placements: tuple[Placement, ...]
        if grid.replicas == 1:
            self.placements = (Shard(0),)
            self.device_mesh = DeviceMesh(device_type, ranks[0])
            self.shards, self._replicas = exchange, None
            return
        # Two groups over the same ranks, as with one replica: FSDP issues its calls from other
        # streams than the head's.
        self.placements = (Replicate(), Shard(0))
        of_fsdp, of_head = (
            [own_group(each.tolist(), rank=rank, timeout=timeout) for each in (ranks.T, ranks)]
            for _ in range(2)
        )
        self.device_mesh = DeviceMesh.from_group(
            [each.group for each in of_fsdp],
            device_type,
            ranks,
            mesh_dim_names=("replica", "shard"),
        )
        self._replicas, self.shards = of_head

    def sum_replicas(self, own: Tensor) -> Tensor:
        """Sum of `own` over the replicas, in place; the same bytes on each."""
        if self._replicas is not None:
            dist.all_reduce(own, group=self._replicas.group)
        return own
