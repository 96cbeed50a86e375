"""Writes a safetensors file tensor by tensor, so that host memory holds one of them at a time.

The library's own writer needs all tensors in host memory at once.
"""

import hashlib
import struct
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.uint8: "U8",
}
_ALIGNMENT = 8
"""Of the first value in the file; the format asks for it by spaces behind the header."""


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def write_tensors(file: Path, tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str]) -> str:
    """Write tensors in the order of their names; returns the SHA-256 of the file.

    Args:
        file: To write.
        tensors: On any device; each is copied to host memory when its turn comes.
        metadata: For the file's header.
    """
    header: dict[str, _Entry | dict[str, str]] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in sorted(tensors.items()):
        begin, end = end, end + tensor.numel() * tensor.itemsize
        header[name] = _Entry(
            dtype=_DTYPES[tensor.dtype], shape=tuple(tensor.shape), data_offsets=(begin, end)
        )
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    digest = hashlib.sha256()
    with file.open("wb") as opened:
        for data in (struct.pack("<Q", len(encoded)), encoded):
            opened.write(data)
            digest.update(data)
        for _, tensor in sorted(tensors.items()):
            held = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            opened.write(held.data)
            digest.update(held.data)
    return digest.hexdigest()
