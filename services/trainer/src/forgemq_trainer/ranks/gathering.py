"""When the parameters of a sharded model are gathered, and its gradients summed over the ranks."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import is_grad_enabled, nn
from torch.distributed.fsdp import FSDPModule

from forgemq_trainer.core.spread_experts import SpreadExperts
from forgemq_trainer.core.traffic import Kept
from forgemq_trainer.ranks.shard_mesh import ShardMesh
from forgemq_trainer.ranks.sharded_head import ShardedHead


class Gathering:
    """Keeps between the passes over a model what there is room for (`core.traffic.Kept`).

    Lifecycle: `with update(...)` around all forwards and backwards of an update, and `with
    reading(...)` around forwards without gradient. Outside both nothing is kept: each pass gathers
    what it needs, and each backward sums the gradients over all ranks.
    """

    def __init__(self, decoder: nn.Module, head: ShardedHead | None, mesh: ShardMesh) -> None:
        """Change nothing yet.

        Args:
            decoder: Sharded by FSDP, layer by layer.
            head: None if it is tied to the embedding, which is the decoder's.
            mesh: The ranks.
        """
        assert isinstance(decoder, FSDPModule)
        self._decoder, self._head, self._mesh = decoder, head, mesh
        parts = [part for part in decoder.modules() if isinstance(part, FSDPModule)]
        self._parts: Sequence[FSDPModule] = parts
        self._layers = [part for part in parts if part is not decoder]
        self._gather_ahead(head)

    def _gather_ahead(self, head: ShardedHead | None) -> None:
        """Let the next layer be gathered while a layer computes, with the experts that it spreads.

        Experts gather nothing ahead themselves: those of a layer that runs forward again in
        backward would gather the layer after it.
        """
        chain = [part for part in self._parts if not isinstance(part, SpreadExperts)]
        for earlier, later in itertools.pairwise(chain):
            earlier.set_modules_to_forward_prefetch([later, *_experts_of(later)])
            if earlier is not self._decoder:
                later.set_modules_to_backward_prefetch([earlier, *_experts_of(earlier)])
        if head is not None:
            last = chain[-1]
            assert isinstance(last, nn.Module)
            last.register_forward_pre_hook(head.gather_beside)

    @contextmanager
    def update(self, kept: Kept, *, backwards: int) -> Iterator[None]:
        """In this context gradients are summed over the replicas in the last backward only.

        Args:
            kept: Between the passes.
            backwards: How many there will be, each after a forward with gradient.
        """
        self._keep_weights(is_kept=kept >= Kept.WEIGHTS)
        self._decoder.set_requires_gradient_sync(kept < Kept.GRADIENTS)
        # A shard of partial sums is kept in place of the shard of the gradient.
        self._decoder.set_requires_all_reduce(False)
        begun = 0

        def begin_pass(_module: nn.Module, _inputs: object) -> None:
            nonlocal begun
            begun += is_grad_enabled()
            if begun == backwards and is_grad_enabled():
                self._decoder.set_requires_gradient_sync(True)
                self._decoder.set_reshard_after_backward(True)

        assert isinstance(self._decoder, nn.Module)
        counting = self._decoder.register_forward_pre_hook(begin_pass)
        with self._kept_head(kept):
            yield
        counting.remove()
        assert begun == backwards, f"{begun} backwards, {backwards} were planned"
        self._keep_weights(is_kept=False)
        self._decoder.set_requires_gradient_sync(True)

    @contextmanager
    def reading(self, kept: Kept) -> Iterator[None]:
        """In this context there are forwards without gradient; then all are sharded again.

        FSDP would take the root's own parameters, the embedding among them, for up to date in the
        next step, although an update has changed their shards.

        Args:
            kept: Between the passes.
        """
        self._keep_weights(is_kept=kept >= Kept.WEIGHTS)
        with self._kept_head(kept):
            yield
        self._keep_weights(is_kept=False)
        for part in self._parts:
            part.reshard()

    @contextmanager
    def _kept_head(self, kept: Kept) -> Iterator[None]:
        if self._head is None:
            yield
            return
        with self._head.kept(
            is_whole_kept=kept >= Kept.HEAD, is_gradient_kept=kept >= Kept.GRADIENTS
        ):
            yield

    def _keep_weights(self, *, is_kept: bool) -> None:
        # The root's own parameters stay gathered from its forward to its backward in any case.
        for layer in self._layers:
            layer.set_reshard_after_forward(not is_kept, recurse=False)
        self._decoder.set_reshard_after_backward(not is_kept)


def _experts_of(layer: FSDPModule) -> list[FSDPModule]:
    assert isinstance(layer, nn.Module)
    return [
        part
        for part in layer.modules()
        if isinstance(part, SpreadExperts) and isinstance(part, FSDPModule)
    ]
