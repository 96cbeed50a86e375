"""Ranks by the experts that they hold: groups with all experts, and holders of the same ones.

Rank r is in expert group r // X, where it holds the experts of place r % X. An expert group is a
run of ranks, so it lies within one machine if X divides the machine's ranks.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from forgemq_contracts.run import Trainer
from forgemq_trainer.core.spread_experts import SpreadExperts
from forgemq_trainer.ranks.ranks import Ranks
from forgemq_trainer.start_checks import check_expert_ranks

EXPERT_CLASSES = (
    "DeepseekV3Experts",
    "Glm4MoeExperts",
    "GptOssExperts",
    "MiniMaxM2Experts",
    "Qwen3MoeExperts",
)
"""Classes of transformers whose parameters have one row for each expert, and which are called with
hidden states, chosen experts and weights."""


class ExpertGroups:
    """This rank among those of its expert group. Implements `core.spread_experts.ExpertPeers`."""

    def __init__(self, ranks: Ranks, *, expert_ranks: int) -> None:
        """Make the process groups; every rank calls this.

        Args:
            ranks: All of them.
            expert_ranks: Ranks that hold all experts between them; divides their number.
        """
        grid = torch.arange(ranks.world_size).view(-1, expert_ranks)
        holders = _own_group(grid.T.tolist(), rank=ranks.rank, deadline_s=ranks.deadline_s)
        self._group = _own_group(grid.tolist(), rank=ranks.rank, deadline_s=ranks.deadline_s)
        self.mesh = DeviceMesh.from_group(
            [holders, self._group],
            ranks.device.type,
            mesh=grid,
            mesh_dim_names=("holders", "experts"),
        )
        self.rank = ranks.rank % expert_ranks
        self.world_size = expert_ranks

    def all_gather(self, own: Tensor) -> list[Tensor]:
        """Gather `own` of every rank of the group, by rank."""
        everyones = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(everyones, own, group=self._group)
        return everyones

    def all_to_all(self, rows: Tensor, *, sent: list[int], received: list[int]) -> Tensor:
        """Send each rank of the group its rows; returns what all sent to this one, by rank."""
        arrived = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=self._group)
        return arrived


def expert_groups(config: Any, trainer: Trainer, *, ranks: Ranks) -> ExpertGroups | None:  # noqa: ANN401  # of transformers
    """The groups that the run asks for; None if each rank runs its tokens through all experts.

    Raises:
        SettingsError: the ranks cannot share out the model's experts evenly.
    """
    check_expert_ranks(config, trainer)
    return (
        ExpertGroups(ranks, expert_ranks=trainer.expert_ranks) if trainer.expert_ranks > 1 else None
    )


def spread_experts(model: nn.Module, groups: ExpertGroups) -> list[SpreadExperts]:
    """Give each rank its share of every layer's experts, in place; returns the layers' modules."""
    found = []
    for name, module in list(model.named_modules()):
        if type(module).__name__ in EXPERT_CLASSES:
            parent, _, child = name.rpartition(".")
            found.append(_spread(module, groups))
            setattr(model.get_submodule(parent), child, found[-1])
    return found


def _spread(stock: Any, groups: ExpertGroups) -> SpreadExperts:  # noqa: ANN401  # of transformers
    shares = {
        name: nn.Parameter(
            distribute_tensor(
                parameter.detach(), groups.mesh["experts"], [Shard(0)], src_data_rank=None
            ),
            requires_grad=parameter.requires_grad,
        )
        for name, parameter in stock.named_parameters()
    }
    spread = SpreadExperts(stock, peers=groups)
    for name, share in shares.items():
        spread.register_parameter(name, share)
    return spread


def _own_group(
    all_ranks: Sequence[Sequence[int]], *, rank: int, deadline_s: float
) -> dist.ProcessGroup:
    """Make a process group of each of these; returns the one with this rank."""
    timeout = timedelta(seconds=deadline_s)
    groups = [dist.new_group(list(ranks), timeout=timeout) for ranks in all_ranks]
    (own,) = (group for group, ranks in zip(groups, all_ranks, strict=True) if rank in ranks)
    assert isinstance(own, dist.ProcessGroup)
    return own
