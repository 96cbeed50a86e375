"""The head of a sharded model: rows of it on each rank, gathered beside the last layer.

It is no part of the decoder, which FSDP shards. FSDP would gather it for the whole step. As the
head runs between forward and backward of the last layer, its rows are gathered beside that layer's
forward, and its gradient is summed beside that layer's backward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from forgemq_trainer.ranks.rank_group import PendingTensor
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
        self._gathering: PendingTensor | None = None
        self._owed: Tensor | None = None
        self._summing: PendingTensor | None = None
        shards = distribute_tensor(
            linear.weight.detach(), mesh.device_mesh, mesh.placements, src_data_rank=None
        )
        linear.weight = nn.Parameter(shards, requires_grad=linear.weight.requires_grad)

    def gather_beside(self, _layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Before the last layer: begin to gather, and take what backward sums beside that layer.

        Args:
            inputs: The layer's, of which the first one is the residual stream.
        """
        if self._whole is None:
            self._gathering = self._begun()
        hidden = inputs[0]
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(self._take_sum)  # type: ignore[no-untyped-call]  # of torch

    def gather(self) -> Tensor:
        """The whole head, in the dtype that the model computes in."""
        result: Tensor = _Gathered.apply(self._local, self)
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
        self._take_sum()
        self._is_whole_kept = self._is_gradient_kept = self._is_deferred = False
        self._whole = self._gathering = None
        owed, self._owed = self._owed, None
        if owed is not None:
            own = self._of_own_rows(self._begun_sum(owed)) if is_gradient_kept else owed
            torch.autograd.backward([self._local], [self._mesh.sum_replicas(own)])

    def whole(self) -> Tensor:
        """Gather the rows of every rank, or take what is kept or already on its way."""
        if self._whole is None:
            gathering = self._begun() if self._gathering is None else self._gathering
            self._gathering = None
            whole = gathering.result()[: self._linear.weight.shape[0]]
            if not self._is_whole_kept:
                return whole
            self._whole = whole
        return self._whole.detach()

    def add_gradient(self, grad: Tensor) -> Tensor | None:
        """Take the gradient of the whole head; returns that of this rank's rows unless it waits."""
        self._take_sum()
        if self._is_gradient_kept:
            # The caller of a backward may change its gradient later.
            self._owe(grad.to(self._linear.weight.dtype, copy=True))
            return None
        summing = self._begun_sum(grad)
        if not self._is_deferred:
            return self._mesh.sum_replicas(self._of_own_rows(summing))
        self._summing = summing
        return None

    @property
    def _local(self) -> Tensor:
        weight = self._linear.weight
        assert isinstance(weight, DTensor)
        return weight.to_local()

    @property
    def _rows_each(self) -> int:
        # As Shard(0) cuts: so many rows each, so the last rank may have fewer, or none.
        return -(-self._linear.weight.shape[0] // self._mesh.grid.shards)

    def _begun(self) -> PendingTensor:
        local = self._local.detach()
        padded = local.new_zeros((self._rows_each, local.shape[1]), dtype=self._dtype)
        padded[: len(local)] = local
        return self._mesh.shards.begin_all_gather(padded)

    def _begun_sum(self, grad: Tensor) -> PendingTensor:
        """Begin to sum the gradient of the whole head over the ranks of this rank's replica."""
        rows, dtype = self._mesh.grid.shards * self._rows_each, self._linear.weight.dtype
        whole = grad
        if len(grad) < rows or grad.dtype != dtype:
            whole = grad.new_zeros((rows, grad.shape[1]), dtype=dtype)
            whole[: len(grad)] = grad
        return self._mesh.shards.begin_reduce_scatter(whole)

    def _of_own_rows(self, summing: PendingTensor) -> Tensor:
        return summing.result()[: len(self._local)]

    def _take_sum(self, _grad: Tensor | None = None) -> None:
        """Add the sum that is on its way, if there is one, to this update's."""
        summing, self._summing = self._summing, None
        if summing is not None:
            self._owe(self._of_own_rows(summing))

    def _owe(self, part: Tensor) -> None:
        self._owed = part if self._owed is None else self._owed.add_(part)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # torch's context has no public type
        _local: Tensor,
        head: ShardedHead,
    ) -> Tensor:
        ctx.head = head
        return head.whole()

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        grad: Tensor,
    ) -> tuple[Tensor | None, ...]:
        head: ShardedHead = ctx.head
        return head.add_gradient(grad), None
