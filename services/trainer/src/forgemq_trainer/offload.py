"""Where keys and values go that the memory budget has no room for.

A GPU offloads to pinned memory of its host. A CPU offloads to a temporary file that is mapped into
memory: its pages belong to the kernel's cache, which writes them out under pressure. The file loses
its name once it is mapped, so it ends with the process; TMPDIR says on which disk it lies.
"""

import math
import tempfile

import torch
from torch import Tensor

from forgemq_trainer.core.attention.carry import MakeStore


def store_of(device: torch.device) -> MakeStore:
    """The store for a computation on this device."""
    return _pinned if device.type == "cuda" else _mapped_file


def _pinned(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, pin_memory=True)


def _mapped_file(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = math.prod(size)
    if count == 0:
        return torch.empty(size, dtype=dtype)
    with tempfile.NamedTemporaryFile(prefix="forgemq-keys-") as file:
        file.truncate(count * dtype.itemsize)
        values = torch.from_file(file.name, shared=True, size=count, dtype=dtype)
    return values.view(size)
