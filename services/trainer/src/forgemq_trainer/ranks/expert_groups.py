"""Ranks by the experts that they hold: groups with all experts, and holders of the same ones.

Rank r is in expert group r // X, where it holds the experts of place r % X. An expert group is a
run of ranks within one replica of the model, so it lies within one machine if X divides the
machine's ranks. Holders of the same experts are in one replica too: between replicas go only
summed gradients.
"""

from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from forgemq_contracts.run import Trainer
from forgemq_settings.environment import SettingsError
from forgemq_trainer.core.spread_experts import ExpertPeers, SpreadExperts
from forgemq_trainer.core.traffic import RankGrid
from forgemq_trainer.ranks.rank_group import own_group
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
    """The groups that this rank is in.

    Attributes:
        peers: The ranks of its expert group.
        experts: The same ranks, as a mesh over which each layer's experts are divided.
        holders: For FSDP, those that hold the same experts; of two dimensions if there are several
            replicas.
    """

    def __init__(self, ranks: Ranks, grid: RankGrid, *, expert_ranks: int) -> None:
        """Make the process groups; every rank calls this.

        Args:
            ranks: All of them.
            grid: Their replicas.
            expert_ranks: Ranks that hold all experts between them; divides the ranks of a replica.
        """
        place = torch.arange(grid.ranks).view(grid.replicas, -1, expert_ranks)
        names: tuple[str, ...] = ("replica", "holders", "experts")
        if grid.replicas == 1:
            place, names = place[0], names[1:]
        groups = [
            own_group(
                place.movedim(dim, -1).flatten(0, -2).tolist(),
                rank=ranks.rank,
                timeout=timedelta(seconds=ranks.deadline_s),
            )
            for dim in range(place.dim())
        ]
        self.peers: ExpertPeers = groups[-1]
        mesh = DeviceMesh.from_group(
            [each.group for each in groups], ranks.device.type, mesh=place, mesh_dim_names=names
        )
        self.experts: DeviceMesh = mesh["experts"]
        self.holders: DeviceMesh = mesh[names[:-1]]


def expert_groups(
    config: Any,  # noqa: ANN401  # of transformers
    trainer: Trainer,
    *,
    ranks: Ranks,
    grid: RankGrid,
) -> ExpertGroups | None:
    """The groups that the run asks for; None if each rank runs its tokens through all experts.

    Raises:
        SettingsError: the ranks cannot share out the model's experts evenly.
    """
    check_expert_ranks(config, trainer)
    if trainer.expert_ranks == 1:
        return None
    return ExpertGroups(ranks, grid, expert_ranks=trainer.expert_ranks)


def spread_experts(model: nn.Module, groups: ExpertGroups) -> list[SpreadExperts]:
    """Give each rank its share of every layer's experts, in place; returns the layers' modules.

    Raises:
        SettingsError: the model has no experts of a known class.
    """
    found: list[SpreadExperts] = []
    for name, module in list(model.named_modules()):
        if type(module).__name__ in EXPERT_CLASSES:
            parent, _, child = name.rpartition(".")
            found.append(_spread(module, groups))
            setattr(model.get_submodule(parent), child, found[-1])
    # A newer transformers may name a family's experts otherwise.
    if not found:
        raise SettingsError(
            f"trainer.expert_ranks: the experts of {type(model).__name__} are of no class that is "
            f"known to be spread ({', '.join(EXPERT_CLASSES)}): it must be 1"
        )
    return found


def _spread(stock: Any, groups: ExpertGroups) -> SpreadExperts:  # noqa: ANN401  # of transformers
    shares = {
        name: nn.Parameter(
            distribute_tensor(parameter.detach(), groups.experts, [Shard(0)], src_data_rank=None),
            requires_grad=parameter.requires_grad,
        )
        for name, parameter in stock.named_parameters()
    }
    spread = SpreadExperts(stock, peers=groups.peers)
    for name, share in shares.items():
        spread.register_parameter(name, share)
    return spread
