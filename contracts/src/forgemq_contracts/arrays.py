"""Token ids and log-probabilities as the little-endian bytes that travel on topics."""

import sys
from array import array
from collections.abc import Iterable


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as int32 bytes."""
    values = array("i", ids)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Token ids of int32 bytes."""
    return view_ids(data).tolist()


def view_ids(data: bytes) -> "array[int]":
    """As `unpack_ids`, for those who read few of them: each becomes an object only when read."""
    values = array("i")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def pack_floats(values: Iterable[float]) -> bytes:
    """Values as float32 bytes."""
    packed = array("f", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_floats(data: bytes) -> list[float]:
    """Values of float32 bytes."""
    values = array("f")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
