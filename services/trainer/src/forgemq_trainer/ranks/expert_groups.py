"""Ranks by the experts that they hold: groups with all experts, and holders of the same ones.

Rank r is in expert group r // X, where it holds the experts of place r % X. An expert group is a
run of ranks, so it lies within one machine if X divides the machine's ranks.
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
        mesh: Of all ranks, by holders of the same experts and by place in an expert group.
    """

    def __init__(self, ranks: Ranks, *, expert_ranks: int) -> None:
        """Make the process groups; every rank calls this.

        Args:
            ranks: All of them.
            expert_ranks: Ranks that hold all experts between them; divides their number.
        """
        grid = torch.arange(ranks.world_size).view(-1, expert_ranks)
        timeout = timedelta(seconds=ranks.deadline_s)
        holders = own_group(grid.T.tolist(), rank=ranks.rank, timeout=timeout)
        peers = own_group(grid.tolist(), rank=ranks.rank, timeout=timeout)
        self.peers: ExpertPeers = peers
        self.mesh = DeviceMesh.from_group(
            [holders.group, peers.group],
            ranks.device.type,
            mesh=grid,
            mesh_dim_names=("holders", "experts"),
        )


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
            distribute_tensor(
                parameter.detach(), groups.mesh["experts"], [Shard(0)], src_data_rank=None
            ),
            requires_grad=parameter.requires_grad,
        )
        for name, parameter in stock.named_parameters()
    }
    spread = SpreadExperts(stock, peers=groups.peers)
    for name, share in shares.items():
        spread.register_parameter(name, share)
    return spread
