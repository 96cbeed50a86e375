"""Parameters in shards over the ranks (FSDP2): each rank keeps a part and gathers layer by layer.

The shards are the fp32 masters; a bfloat16 model is gathered in bfloat16, and its gradients are
added up in fp32. Frozen parameters are kept in the model's dtype and have no gradients, so none are
sent. Gradients are summed over the ranks, not averaged: loss weights already divide by the entries
of the whole step.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from forgemq_trainer.core.low_rank import factors_of
from forgemq_trainer.loading import allocate
from forgemq_trainer.model import LoadedModel
from forgemq_trainer.ranks.ranks import Ranks


def shard(loaded: LoadedModel, *, ranks: Ranks, dtype: torch.dtype) -> LoadedModel:
    """Spread the model's parameters over the ranks, in place.

    Args:
        loaded: The same on every rank, with parameters at least as wide as fp32; frozen ones may
            be of `dtype`. On the meta device they get memory for this rank's part here, which is
            not filled.
        ranks: All of them.
        dtype: That the model computes in.
    """
    model, decoder = loaded.model, loaded.policy.decoder
    head: Any = model.get_output_embeddings()  # type: ignore[operator]  # transformers' method
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]  # transformers' method
    is_tied = head.weight is embedding.weight
    is_empty = head.weight.is_meta
    hidden = head.weight.shape[1]
    wide = torch.promote_types(dtype, torch.float32)
    precision = MixedPrecisionPolicy(
        param_dtype=None if all(p.dtype == dtype for p in model.parameters()) else dtype,
        reduce_dtype=wide,
        cast_forward_inputs=False,  # Cosines and sines stay in fp32.
    )
    layers: Any = decoder.layers
    for part in (*layers, decoder):
        fully_shard(part, mesh=ranks.mesh, mp_policy=precision)
        assert isinstance(part, FSDPModule)
        # FSDP averages by default; see the module's docstring.
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    # The head is no part of the decoder: untied it is sharded here, by rows, and gathered by
    # `_GatheredHead`; FSDP would gather it for the whole step instead of for its chunk.
    if not is_tied:
        shards = distribute_tensor(head.weight.detach(), ranks.mesh, [Shard(0)], src_data_rank=None)
        head.weight = nn.Parameter(shards, requires_grad=head.weight.requires_grad)
    if is_empty:
        allocate(model, device=ranks.device)
    if is_tied:
        head.weight = embedding.weight
    policy = replace(
        loaded.policy,
        head_VH=torch.empty((0, hidden), dtype=dtype, device=ranks.device),
        # FSDP keeps the root's own parameters gathered, the embedding among them, until backward
        # is over.
        gather_head=(lambda: embedding.weight) if is_tied else _gather(head, ranks, dtype=dtype),
        shape=replace(loaded.policy.shape, value_bytes=dtype.itemsize, wide_bytes=wide.itemsize),
    )
    return LoadedModel(model=model, policy=policy)


def reshard(decoder: nn.Module) -> None:
    """Drop what a forward gathered and no backward follows to drop.

    FSDP would take the root's own parameters, the embedding among them, for up to date in the next
    step, although an update has changed their shards.
    """
    for part in decoder.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def whole_state(model: nn.Module, *, dtype: torch.dtype, is_kept: bool) -> dict[str, Tensor]:
    """Gather the model's state with every tensor whole, in `dtype`; collective.

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


class FsdpShards:
    """Shards of tensors that are laid out as FSDP2 spread the model's parameters."""

    def __init__(self, ranks: Ranks, *, dtype: torch.dtype) -> None:
        self._ranks = ranks
        self.are_masters = dtype not in (torch.float32, torch.float64)
        self.is_first = ranks.rank == 0

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's part of a sharded parameter or gradient; shares its memory."""
        assert isinstance(tensor, DTensor)
        with torch.no_grad():
            local = tensor.to_local()
        return local.detach()

    def all_reduce(self, own: Tensor) -> Tensor:
        """Sum over the ranks; collective."""
        return self._ranks.all_reduce(own)


def _gather(head: nn.Linear, ranks: Ranks, *, dtype: torch.dtype) -> Callable[[], Tensor]:
    """A function that gathers the head; backward sums its gradient over the ranks into shards."""

    def gather() -> Tensor:
        weight = head.weight
        assert isinstance(weight, DTensor)
        result: Tensor = _GatheredHead.apply(weight.to_local(), weight.shape[0], ranks, dtype)
        return result

    return gather


class _GatheredHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # torch's context has no public type
        local: Tensor,
        rows: int,
        ranks: Ranks,
        dtype: torch.dtype,
    ) -> Tensor:
        # As Shard(0) cuts: ceil(rows / ranks) rows each, so the last rank may have fewer, or none.
        each = -(-rows // ranks.world_size)
        padded = local.new_zeros((each, local.shape[1]), dtype=dtype)
        padded[: len(local)] = local
        ctx.ranks, ctx.each, ctx.own = ranks, each, local
        return torch.cat(ranks.all_gather(padded))[:rows]

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        grad: Tensor,
    ) -> tuple[Tensor | None, ...]:
        own: Tensor = ctx.own
        parts = torch.split(grad.to(own.dtype), ctx.each)
        padded = []
        for n in range(ctx.ranks.world_size):
            part = own.new_zeros((ctx.each, own.shape[1]))
            if n < len(parts):
                part[: len(parts[n])] = parts[n]
            padded.append(part)
        return ctx.ranks.reduce_scatter(padded)[: len(own)], None, None, None
