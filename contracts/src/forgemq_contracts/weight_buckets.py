"""Which tensors travel together on the fast path of new weights.

The trainer (rank 0 of a lane's process group) broadcasts one flat byte tensor for each bucket, and
the lane passes names, dtypes and shapes in it to its engine. Both compute the same buckets from the
header of the durable safetensors file, so no manifest has to travel.
"""

import itertools
import math
import struct
from collections.abc import Sequence
from typing import Annotated

import msgspec

BUCKET_BYTES_MAX = 64 * 1024 * 1024
"""Bytes of one broadcast: enough to hide its latency, little beside the engine's memory."""

HEADER_BYTES_MAX = 100_000_000
"""The limit of the safetensors format: a file of any other kind is refused, not read whole."""

_LENGTH = struct.Struct("<Q")
_DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
}
_ITEM_BYTES = dict(_DTYPES.values())


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor of the weights; `dtype` as torch names it, for example bfloat16."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        """Bytes of one value."""
        return _ITEM_BYTES[self.dtype]

    @property
    def size_bytes(self) -> int:
        """Bytes of its values, without padding."""
        return math.prod(self.shape) * self.item_bytes


def header_bytes(file_start: bytes) -> int:
    """Bytes to read from the start of a safetensors file, so that they hold its whole header.

    Args:
        file_start: At least the first 8 bytes of the file.

    Raises:
        ValueError: Fewer than 8 bytes, or a length that no safetensors file has.
    """
    if len(file_start) < _LENGTH.size:
        raise ValueError(f"a safetensors file has at least 8 bytes, got {len(file_start)}")
    length = int(_LENGTH.unpack_from(file_start)[0])
    if length > HEADER_BYTES_MAX:
        raise ValueError(f"safetensors header of {length} bytes, at most {HEADER_BYTES_MAX}")
    return _LENGTH.size + length


def tensor_specs(file_start: bytes) -> tuple[TensorSpec, ...]:
    """The tensors of a safetensors file, sorted by name.

    Args:
        file_start: The first `header_bytes` bytes of the file, or more.

    Raises:
        ValueError: The header is cut short or damaged, or a dtype is unknown.
    """
    header = _header(file_start)
    specs = []
    for name in sorted(header):
        dtype = header[name].dtype
        if dtype not in _DTYPES:
            raise ValueError(f"tensor {name}: dtype {dtype} is not one of {sorted(_DTYPES)}")
        specs.append(TensorSpec(name, _DTYPES[dtype][0], header[name].shape))
    return tuple(specs)


def tensor_ranges(file_start: bytes) -> dict[str, tuple[int, int]]:
    """First byte of each tensor's values in the file, and one past the last, by name.

    Args:
        file_start: The first `header_bytes` bytes of the file, or more.

    Raises:
        ValueError: The header is cut short or damaged.
    """
    values = header_bytes(file_start)
    return {
        name: (values + entry.data_offsets[0], values + entry.data_offsets[1])
        for name, entry in _header(file_start).items()
    }


class _Entry(msgspec.Struct, frozen=True):
    """What a header says of one tensor; the offsets count from the header's end."""

    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[int, int]


def _header(file_start: bytes) -> dict[str, _Entry]:
    """The header's entries by tensor name.

    Raises:
        ValueError: It is cut short, or no header of the format.
    """
    end = header_bytes(file_start)
    if len(file_start) < end:
        raise ValueError(f"safetensors header needs {end} bytes, got {len(file_start)}")
    try:
        header = msgspec.json.decode(file_start[_LENGTH.size : end], type=dict[str, msgspec.Raw])
        return {
            name: msgspec.json.decode(entry, type=_Entry)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except msgspec.DecodeError as error:
        raise ValueError(f"safetensors header: {error}") from error


def buckets(
    tensors: Sequence[TensorSpec], bytes_max: int = BUCKET_BYTES_MAX
) -> tuple[tuple[TensorSpec, ...], ...]:
    """Runs of tensors in name order, each at most `bytes_max` unless it is one larger tensor.

    A tensor starts a new bucket if it would not be aligned to its item size in the current one,
    because the receiver views the flat bytes in place. Tensors without values are left out.

    Example: sizes 40, 30, 50, 10 with bytes_max 80 give (40, 30), (50, 10).

    Raises:
        ValueError: `bytes_max` is below 1, or two tensors have the same name.
    """
    if bytes_max < 1:
        raise ValueError(f"bytes_max must be at least 1, got {bytes_max}")
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    for left, right in itertools.pairwise(ordered):
        if left.name == right.name:
            raise ValueError(f"two tensors are named {left.name}")
    runs: list[list[TensorSpec]] = []
    filled_bytes = 0
    for tensor in ordered:
        if tensor.size_bytes == 0:
            continue
        is_aligned = filled_bytes % _ITEM_BYTES[tensor.dtype] == 0
        if not runs or not is_aligned or filled_bytes + tensor.size_bytes > bytes_max:
            runs.append([])
            filled_bytes = 0
        runs[-1].append(tensor)
        filled_bytes += tensor.size_bytes
    return tuple(tuple(run) for run in runs)
