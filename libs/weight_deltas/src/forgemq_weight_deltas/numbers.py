"""Values as integers, so that small changes are small numbers, and their bytes by significance.

Equal bits are equal integers, whatever the dtype: NaN, -0.0 and quantised formats are kept exactly.
Neighbours among floating-point numbers are neighbours among these integers.
"""

from typing import Any, TypeAlias

import cramjam
import numpy as np
from numpy.typing import NDArray

from forgemq_weight_deltas.records import FRAME_BYTES_MAX, DeltaError

Integers: TypeAlias = NDArray[np.unsignedinteger[Any]]

_ZSTD_LEVEL = 3

_GAP = np.dtype("<u4")

_DENSE_ABOVE = 0.25
"""Share of changed values above which all are written: a place takes about as much as a zero."""


def integers(values: NDArray[np.uint8], *, value_bytes: int) -> Integers:
    """A view of these bytes as unsigned little-endian integers."""
    return values.view(np.dtype(f"<u{value_bytes}"))


def differences(base: Integers, new: Integers) -> Integers:
    """New minus base, modulo the integers' range; signs are in the lowest bit, so near is small."""
    difference = new - base
    sign = difference >> (8 * difference.itemsize - 1)
    return np.asarray((difference << 1) ^ np.negative(sign), dtype=difference.dtype)


def added(base: Integers, difference: Integers) -> Integers:
    """The new values; undoes `differences`."""
    by = (difference >> 1) ^ np.negative(difference & 1)
    return np.asarray(base + by, dtype=base.dtype)


def is_dense(*, changed: int, values: int) -> bool:
    """Whether a part is written whole."""
    return changed > _DENSE_ABOVE * values


def packed_places(changed: NDArray[np.intp]) -> bytes:
    """Ascending places as the gaps between them."""
    return packed(np.diff(changed, prepend=-1).astype(_GAP) - 1)


def unpacked_places(data: bytes, *, count: int, values: int) -> NDArray[np.intp]:
    """Undo `packed_places`.

    Raises:
        DeltaError: a place is beyond the part's values, or the frame is damaged.
    """
    gaps = unpacked(data, count=count, value_bytes=_GAP.itemsize)
    found = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if count and found[-1] >= values:
        raise DeltaError(f"changes value {found[-1]} of a part of {values}")
    return found.astype(np.intp)


def packed(numbers: Integers) -> bytes:
    """Compressed, all lowest bytes first: high bytes of small numbers are zeros side by side."""
    data = numbers.view(np.uint8)
    planes = np.concatenate([data[plane :: numbers.itemsize] for plane in range(numbers.itemsize)])
    return bytes(cramjam.zstd.compress(planes.data, level=_ZSTD_LEVEL))


def unpacked(data: bytes, *, count: int, value_bytes: int) -> Integers:
    """Undo `packed`.

    Raises:
        DeltaError: the frame is damaged, or of another number of values.
    """
    size_bytes = count * value_bytes
    if size_bytes > FRAME_BYTES_MAX:
        raise DeltaError(f"a frame of {size_bytes} bytes, at most {FRAME_BYTES_MAX}")
    buffer = bytearray(size_bytes)
    try:
        got = cramjam.zstd.decompress_into(data, buffer)
    except cramjam.DecompressionError as error:
        raise DeltaError(f"a frame does not decompress: {error}") from error
    if got != size_bytes:
        raise DeltaError(f"a frame has {got} bytes, not {size_bytes}")
    planes = np.frombuffer(buffer, np.uint8)
    ordered = np.empty(size_bytes, np.uint8)
    for plane in range(value_bytes):
        ordered[plane::value_bytes] = planes[plane * count : (plane + 1) * count]
    return integers(ordered, value_bytes=value_bytes)
