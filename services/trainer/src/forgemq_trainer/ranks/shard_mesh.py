"""How the ranks hold the model: replicas of it, each in shards over ranks that follow one another.

Example: with 8 ranks and 4 of them to a replica, ranks 0 to 3 hold the model once and ranks 4 to 7
once more. Ranks are numbered machine by machine, so a replica whose number of ranks divides that of
a machine gathers its parameters within that machine. Between machines go only summed gradients.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from forgemq_trainer.core.traffic import RankGrid


class ShardMesh:
    """This rank's place among the replicas, and the groups that it sums and gathers in.

    Attributes:
        grid: How many ranks hold the model once, and how often they hold it.
        shard: This rank's shard, from 0.
        replica: This rank's replica, from 0.
        device_mesh: For FSDP; of two dimensions if there are several replicas.
        placements: Of a parameter in that mesh.
    """

    def __init__(
        self, grid: RankGrid, *, rank: int, device_type: str, timeout: timedelta, exchange: object
    ) -> None:
        """Make the groups; every rank calls it.

        Args:
            grid: Of all ranks.
            rank: This one.
            device_type: That the parameters are on.
            timeout: How long a rank waits for another.
            exchange: The group in which all ranks compute together.
        """
        assert isinstance(exchange, dist.ProcessGroup)
        self.grid = grid
        self.replica, self.shard = divmod(rank, grid.shards)
        ranks = torch.arange(grid.ranks).reshape(grid.replicas, grid.shards)
        self.placements: tuple[Placement, ...]
        if grid.replicas == 1:
            self.placements = (Shard(0),)
            self.device_mesh = DeviceMesh(device_type, ranks[0])
            self._shards, self._replicas = exchange, None
            return
        # Two groups over the same ranks, as with one replica: FSDP issues its calls from other
        # streams than the head's.
        self.placements = (Replicate(), Shard(0))
        of_fsdp, of_head = (
            [_own_group(each.tolist(), rank=rank, timeout=timeout) for each in (ranks.T, ranks)]
            for _ in range(2)
        )
        self.device_mesh = DeviceMesh.from_group(
            of_fsdp, device_type, ranks, mesh_dim_names=("replica", "shard")
        )
        self._replicas, self._shards = of_head

    def all_gather(self, own: Tensor) -> list[Tensor]:
        """Gather `own` of every rank of this replica, by shard; all have one shape."""
        own = own.contiguous()
        everyones = [torch.empty_like(own) for _ in range(self.grid.shards)]
        dist.all_gather(everyones, own, group=self._shards)
        return everyones

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """Sum over this replica's ranks of their `parts[this shard]`; all have one shape."""
        summed = torch.empty_like(parts[0])
        dist.reduce_scatter(summed, [part.contiguous() for part in parts], group=self._shards)
        return summed

    def sum_replicas(self, own: Tensor) -> Tensor:
        """Sum of `own` over the replicas, in place; the same bytes on each."""
        if self._replicas is not None:
            dist.all_reduce(own, group=self._replicas)
        return own


def _own_group(
    groups: Sequence[Sequence[int]], *, rank: int, timeout: timedelta
) -> dist.ProcessGroup:
    """Make a group of each of these lists of ranks; returns that of this rank."""
    own = None
    for ranks in groups:
        group = dist.new_group(ranks=list(ranks), timeout=timeout)
        own = group if rank in ranks else own
    assert isinstance(own, dist.ProcessGroup)
    return own
