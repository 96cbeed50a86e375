"""Writes what changed between two files of weights."""

import itertools
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from forgemq_contracts.weight_buckets import header_bytes, tensor_ranges, tensor_specs
from forgemq_weight_deltas.numbers import differences, integers, is_dense, packed, packed_places
from forgemq_weight_deltas.records import (
    LENGTH,
    DeltaFigures,
    EndedFile,
    EndedTensor,
    Frame,
    OtherLayoutError,
    Part,
    Start,
)

PART_BYTES = 64 * 2**20
"""Compared at once, which takes about four times as much memory; a tensor may be far larger."""


class _Weights:
    """A safetensors file, mapped."""

    def __init__(self, path: Path) -> None:
        self.data: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        self.header = self.data[: header_bytes(self.data[:8].tobytes())].tobytes()

    def tensors(self) -> Iterator[tuple[str, int, int, int]]:
        """Name, first byte, end and bytes of a value, of each tensor that has values."""
        ranges = tensor_ranges(self.header)
        for spec in tensor_specs(self.header):
            if spec.size_bytes:
                yield spec.name, *ranges[spec.name], spec.item_bytes


class _DeltaFile:
    """Frames in the order they are written, and their figures so far."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size_bytes = 0
        self.changed = 0

    def write(self, frame: Frame) -> None:
        """Write a record."""
        self.write_bytes(msgspec.msgpack.encode(frame))

    def write_bytes(self, data: bytes) -> None:
        """Write a frame."""
        self._file.write(LENGTH.pack(len(data)))
        self._file.write(data)
        self.size_bytes += LENGTH.size + len(data)


def write_delta(base: Path, new: Path, file: BinaryIO) -> DeltaFigures:
    """Write what makes the file `new` of the file `base`, both safetensors.

    Raises:
        OtherLayoutError: their headers are not the same bytes, or their sizes differ.
    """
    old, newer = _Weights(base), _Weights(new)
    if old.header != newer.header or len(old.data) != len(newer.data):
        raise OtherLayoutError(f"{base} and {new} do not have the same tensors at the same places")
    delta = _DeltaFile(file)
    delta.write(Start(header_bytes=len(newer.header), size_bytes=len(newer.data)))
    values = 0
    for name, start, end, value_bytes in newer.tensors():
        values += (end - start) // value_bytes
        bounds = itertools.pairwise([*range(start, end, PART_BYTES), end])
        written = [
            _write_part(old.data[first:last], newer.data[first:last], delta, first, value_bytes)
            for first, last in bounds
        ]
        if any(written):
            crc32 = zlib.crc32(newer.data[start:end].data)
            delta.write(EndedTensor(name=name, start=start, end=end, crc32=crc32))
    delta.write(EndedFile())
    return DeltaFigures(values=values, changed=delta.changed, size_bytes=delta.size_bytes)


def _write_part(
    old: NDArray[np.uint8], new: NDArray[np.uint8], delta: _DeltaFile, start: int, value_bytes: int
) -> bool:
    """Write one part; False if nothing changed in it."""
    before, after = (integers(each, value_bytes=value_bytes) for each in (old, new))
    changed = np.flatnonzero(before != after)
    if not len(changed):
        return False
    delta.changed += len(changed)
    where = b""
    values = len(after)
    if not is_dense(changed=len(changed), values=values):
        where = packed_places(changed)
        before, after = before[changed], after[changed]
    delta.write(Part(start=start, values=values, value_bytes=value_bytes, changed=len(after)))
    delta.write_bytes(where)
    delta.write_bytes(packed(differences(before, after)))
    return True
