"""Counts what a rank of a test sends in collectives."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode


class SentBytes(TorchDispatchMode):
    """Counts the bytes that this rank sends in collectives, each made in a ring.

    Tokens on their way to experts are counted in `test_ranks_experts.py`.
    """

    def __init__(self, travelling: ProcessGroup | None) -> None:
        """Count nothing yet; nor, ever, what goes through the group of such tokens."""
        super().__init__()
        self.sent_bytes = 0.0
        self._travelling = travelling

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Count a collective, and make it."""
        name = str(func)
        if name == "_c10d_functional.all_gather_into_tensor.default":
            size = _resolve_process_group(args[2]).size()
            self.sent_bytes += _bytes(args[0]) * (size - 1)
        elif name.startswith("c10d."):
            boxed = next(each for each in args if isinstance(each, torch.ScriptObject))
            group = ProcessGroup.unbox(boxed)
            if self._travelling is None or group.group_name != self._travelling.group_name:
                self.sent_bytes += _sent(name, args, size=group.size())
        return func(*args, **(kwargs or {}))


def _sent(name: str, args: Sequence[Any], *, size: int) -> float:
    """Bytes that each of so many ranks sends in a collective."""
    whole, times = {
        "c10d._allgather_base_.default": (args[0], 1),
        "c10d.allgather_.default": (args[0], 1),
        "c10d._reduce_scatter_base_.default": (args[1], 1),
        "c10d.reduce_scatter_.default": (args[1], 1),
        "c10d.allreduce_.default": (args[0], 2),
        # Nothing in it is for this rank itself.
        "c10d.alltoall_base_.default": (args[1], size / max(1, size - 1)),
    }[name]
    return times * _bytes(whole) * (size - 1) / size


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(map(_bytes, tensors))
