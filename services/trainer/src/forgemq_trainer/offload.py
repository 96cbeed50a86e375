"""Stores for keys and values that the memory budget has no room for.

A GPU offloads to pinned memory of its host. A CPU offloads to a temporary file that is mapped into
memory: its pages belong to the kernel's cache, which writes them to disk under pressure. The file's
name is removed once it is mapped, so the file ends with the process. TMPDIR names its folder.
"""

import math
import tempfile

import torch
from torch import Tensor

from forgemq_trainer.core.attention.carry import MakeStore


def store_of(device: torch.device) -> MakeStore:
    """Allocates the store for a computation on this device."""
    return _allocate_pinned if device.type == "cuda" else _map_file


def _allocate_pinned(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    # Pinned, so that copies to and from the GPU need no intermediate buffer.
    return torch.empty(size, dtype=dtype, pin_memory=True)


def _map_file(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = math.prod(size)
    if count == 0:
        return torch.empty(size, dtype=dtype)  # An empty file cannot be mapped.
    with tempfile.NamedTemporaryFile(prefix="forgemq-keys-") as file:
        file.truncate(count * dtype.itemsize)
        values = torch.from_file(file.name, shared=True, size=count, dtype=dtype)
    return values.view(size)
