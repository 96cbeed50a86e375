"""The head of a sharded model: rows of it on each rank, gathered for its chunk.

It is no part of the decoder, which FSDP shards. FSDP would gather it for the whole step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from forgemq_trainer.ranks.shard_mesh import ShardMesh


class ShardedHead:
    """Gathers the head, and sums its gradient over the ranks into their shards.

    Outside of `kept` each call of `gather` gathers, and each backward sums over all ranks.
    """

    def __init__(self, linear: nn.Linear, mesh: ShardMesh, *, dtype: torch.dtype) -> None:
        """Shard it in place.

        Args:
            linear: The head, the same on every rank or on the meta device.
            mesh: The ranks.
            dtype: To gather it in.
        """
        self._linear, self._mesh, self._dtype = linear, mesh, dtype
        self._is_whole_kept = self._is_gradient_kept = self._is_deferred = False
        self._whole: Tensor | None = None
        self._owed: Tensor | None = None
        shards = distribute_tensor(
            linear.weight.detach(), mesh.device_mesh, mesh.placements, src_data_rank=None
        )
        linear.weight = nn.Parameter(shards, requires_grad=linear.weight.requires_grad)

    def gather(self) -> Tensor:
        """The whole head, in the dtype that the model computes in."""
        weight = self._linear.weight
        assert isinstance(weight, DTensor)
        result: Tensor = _Gathered.apply(weight.to_local(), self)
        return result

    @contextmanager
    def kept(self, *, is_whole_kept: bool, is_gradient_kept: bool) -> Iterator[None]:
        """In this context the gradient is summed over the replicas once, at its end.

        Args:
            is_whole_kept: Gather the head once.
            is_gradient_kept: Hold the gradient of the whole head until the end, instead of the sums
                of this rank's rows.
        """
        self._is_whole_kept, self._is_gradient_kept = is_whole_kept, is_gradient_kept
        self._is_deferred = True
        yield
        self._is_whole_kept = self._is_gradient_kept = self._is_deferred = False
        self._whole = None
        owed, self._owed = self._owed, None
        if owed is not None:
            own = self._reduced(owed) if is_gradient_kept else owed
            weight = self._linear.weight
            assert isinstance(weight, DTensor)
            torch.autograd.backward([weight.to_local()], [self._mesh.sum_replicas(own)])

    def whole(self, local: Tensor) -> Tensor:
        """Gather the rows of every rank, or take what is kept."""
        if self._whole is None:
            rows = self._linear.weight.shape[0]
            padded = local.new_zeros((self._rows_each, local.shape[1]), dtype=self._dtype)
            padded[: len(local)] = local
            whole = torch.cat(self._mesh.shards.all_gather(padded))[:rows]
            if not self._is_whole_kept:
                return whole
            self._whole = whole
        return self._whole.detach()

    def add_gradient(self, grad: Tensor) -> Tensor | None:
        """Take the gradient of the whole head; returns that of this rank's rows unless it waits."""
        # The caller of a backward may change its gradient later.
        wide = grad.to(self._linear.weight.dtype, copy=self._is_gradient_kept)
        part = wide if self._is_gradient_kept else self._reduced(wide)
        if not self._is_deferred:
            return self._mesh.sum_replicas(part)
        self._owed = part if self._owed is None else self._owed.add_(part)
        return None

    @property
    def _rows_each(self) -> int:
        # As Shard(0) cuts: so many rows each, so the last rank may have fewer, or none.
        return -(-self._linear.weight.shape[0] // self._mesh.grid.shards)

    def _reduced(self, grad: Tensor) -> Tensor:
        """This rank's rows of the sum over the ranks of its replica."""
        each = self._rows_each
        parts = torch.split(grad, each)
        padded = []
        for n in range(self._mesh.grid.shards):
            part = grad.new_zeros((each, grad.shape[1]))
            if n < len(parts):
                part[: len(parts[n])] = parts[n]
            padded.append(part)
        weight = self._linear.weight
        assert isinstance(weight, DTensor)
        return self._mesh.shards.reduce_scatter(padded)[: len(weight.to_local())]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # torch's context has no public type
        local: Tensor,
        head: ShardedHead,
    ) -> Tensor:
        ctx.head = head
        return head.whole(local)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        grad: Tensor,
    ) -> tuple[Tensor | None, ...]:
        head: ShardedHead = ctx.head
        return head.add_gradient(grad), None
