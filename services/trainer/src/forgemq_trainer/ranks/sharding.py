"""Parameters in shards over the ranks (FSDP2): each rank keeps a part and gathers layer by layer.

The shards are the fp32 masters; a bfloat16 model is gathered in bfloat16, and its gradients are
added up in fp32. Frozen parameters are kept in the model's dtype and have no gradients, so none are
sent. Gradients are summed over the ranks, not averaged: loss weights already divide by the entries
of the whole step. If there are several replicas of the model (`shard_mesh`), each holds the same
bytes: gradients are summed over all of them before the update.
"""

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from forgemq_trainer.core.drafting import PolicyEnds
from forgemq_trainer.core.low_rank import factors_of
from forgemq_trainer.loading import allocate
from forgemq_trainer.model import LoadedModel
from forgemq_trainer.ranks.expert_groups import ExpertGroups, spread_experts
from forgemq_trainer.ranks.gathering import Gathering
from forgemq_trainer.ranks.ranks import Ranks
from forgemq_trainer.ranks.shard_mesh import ShardMesh
from forgemq_trainer.ranks.sharded_head import ShardedHead


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedPolicy(LoadedModel):
    """A model of which this rank holds a shard.

    Attributes:
        gathering: Says what passes over the model keep for one another.
        mesh: The ranks that hold it.
    """

    gathering: Gathering
    mesh: ShardMesh


def shard(
    loaded: LoadedModel,
    *,
    ranks: Ranks,
    dtype: torch.dtype,
    mesh: ShardMesh | None = None,
    experts: ExpertGroups | None = None,
) -> ShardedPolicy:
    """Spread the model's parameters over the ranks, in place.

    Args:
        loaded: The same on every rank, with parameters at least as wide as fp32; frozen ones may
            be of `dtype`. On the meta device they get memory for this rank's part here, which is
            not filled.
        ranks: All of them.
        dtype: That the model computes in.
        mesh: How the ranks are divided into replicas; None makes one replica of all.
        experts: Groups of ranks between which tokens travel to their experts; None gathers experts
            like other parameters.
    """
    mesh = ranks.mesh(ranks.world_size) if mesh is None else mesh
    model, decoder = loaded.model, loaded.policy.decoder
    head: Any = model.get_output_embeddings()  # type: ignore[operator]  # transformers' method
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]  # transformers' method
    is_tied = head.weight is embedding.weight
    is_empty = head.weight.is_meta
    hidden = head.weight.shape[1]
    wide = torch.promote_types(dtype, torch.float32)
    precision = _precision(model, dtype, wide=wide)
    if experts is not None:
        _shard_experts(model, experts, precision)
    _shard_layers(decoder, mesh, precision)
    sharded_head = None if is_tied else ShardedHead(head, mesh, dtype=dtype)
    if is_empty:
        allocate(model, device=ranks.device)
    if is_tied:
        head.weight = embedding.weight
    policy = replace(
        loaded.policy,
        head_VH=torch.empty((0, hidden), dtype=dtype, device=ranks.device),
        # FSDP keeps the root's own parameters gathered, the embedding among them, until backward
        # is over.
        gather_head=(lambda: embedding.weight) if sharded_head is None else sharded_head.gather,
        shape=replace(
            loaded.policy.shape,
            value_bytes=dtype.itemsize,
            wide_bytes=wide.itemsize,
            expert_ranks=1 if experts is None else experts.peers.world_size,
        ),
    )
    return ShardedPolicy(
        model=model,
        policy=policy,
        gathering=Gathering(decoder, sharded_head, mesh),
        mesh=mesh,
    )


def _precision(model: nn.Module, dtype: torch.dtype, *, wide: torch.dtype) -> MixedPrecisionPolicy:
    """Gather parameters in the dtype of the computation, and sum gradients in a wide one."""
    return MixedPrecisionPolicy(
        param_dtype=None if all(p.dtype == dtype for p in model.parameters()) else dtype,
        reduce_dtype=wide,
        cast_forward_inputs=False,  # Cosines and sines stay in fp32.
    )


def _shard_experts(
    model: nn.Module, experts: ExpertGroups, precision: MixedPrecisionPolicy
) -> None:
    """Give each rank its experts, and its shard of them if others hold the same ones."""
    for part in spread_experts(model, experts):
        # Not by experts, as the holders of a share may be more than its experts.
        fully_shard(
            part,
            mesh=experts.holders,
            mp_policy=precision,
            shard_placement_fn=lambda _: Shard(1),
        )


def _shard_layers(decoder: nn.Module, mesh: ShardMesh, precision: MixedPrecisionPolicy) -> None:
    """Let FSDP gather layer by layer, and the rest of the decoder for a whole pass."""
    layers: Any = decoder.layers
    for part in (*layers, decoder):
        fully_shard(part, mesh=mesh.device_mesh, mp_policy=precision)
    _sum_gradients(decoder)
    # The last norm returns a view, which autograd does not let anybody change in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def _sum_gradients(decoder: nn.Module) -> None:
    """Let FSDP sum gradients, which it averages by default; see the module's docstring."""
    for part in decoder.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def whole_state(model: nn.Module, *, dtype: torch.dtype, is_kept: bool) -> dict[str, Tensor]:
    """Gather the model's state with every tensor whole, in `dtype`; every rank of a replica calls.

    Args:
        model: Sharded.
        dtype: Of the parameters; a buffer, as a router's bias, keeps its own.
        is_kept: False on the ranks that only send their part; they get an empty result.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    whole: dict[int, Tensor] = {}  # Tied parameters stay one tensor, which is saved once.
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        tensor = parameters.get(name, value)
        if id(tensor) not in whole:
            full = tensor.detach()
            full = full.full_tensor() if isinstance(full, DTensor) else full
            full = full.to(dtype) if name in parameters else full
            whole[id(tensor)] = full.cpu() if is_kept else full.new_empty(0)
        state[name] = whole[id(tensor)]
    return state if is_kept else {}


def whole_factors(model: nn.Module, *, dtype: torch.dtype, is_kept: bool) -> dict[str, Tensor]:
    """Gather the adapters' factors by the names in their file, as `whole_state` does."""
    factors: dict[str, Tensor] = {}
    for name, factor in factors_of(model).items():
        sharded = factor.detach()
        assert isinstance(sharded, DTensor)
        whole = sharded.full_tensor().to(dtype)
        if is_kept:
            factors[name] = whole.cpu()
    return factors


def whole_ends(model: Any, *, dtype: torch.dtype) -> PolicyEnds:  # noqa: ANN401  # of transformers
    """Gather embedding and head in the dtype of the computation; every rank of a replica calls."""

    def whole(parameter: Tensor) -> Tensor:
        sharded = parameter.detach().to(dtype)
        assert isinstance(sharded, DTensor)
        return sharded.full_tensor()

    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    first = whole(embedding)
    return PolicyEnds(embedding_VH=first, head_VH=first if head is embedding else whole(head))


class FsdpShards:
    """Shards of tensors that are laid out as FSDP2 spread the model's parameters."""

    def __init__(self, ranks: Ranks, mesh: ShardMesh, *, dtype: torch.dtype) -> None:
        self._ranks = ranks
        self.are_masters = dtype not in (torch.float32, torch.float64)
        self.is_first = mesh.shard == 0
        self.replica, self.replicas = mesh.replica, mesh.grid.replicas

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's part of a sharded parameter or gradient; shares its memory."""
        assert isinstance(tensor, DTensor)
        with torch.no_grad():
            local = tensor.to_local()
        return local.detach()

    def sum_shards(self, own: Tensor) -> Tensor:
        """Sum over the shards, the same bytes on all ranks; collective.

        Only one replica's shards count. Each replica's own sum may be made in another order, and
        replicas must not differ in a bit.
        """
        return self._ranks.all_reduce(own if self.replica == 0 else torch.zeros_like(own))
