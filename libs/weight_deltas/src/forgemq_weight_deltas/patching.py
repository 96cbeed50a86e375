"""Makes newer weights of older ones in place, by a delta file."""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from forgemq_weight_deltas.numbers import added, integers, unpacked, unpacked_places
from forgemq_weight_deltas.records import (
    FORMAT,
    FRAME_BYTES_MAX,
    LENGTH,
    DeltaError,
    EndedFile,
    EndedTensor,
    Frame,
    Part,
    Start,
    frames,
)


def patch(target: Path, delta: BinaryIO) -> None:
    """Change a file of weights in place; after an error its content is undefined.

    Raises:
        DeltaError: the delta is damaged, cut short or of another format, or a tensor does not have
            the checksum it was written with, since the file was not the delta's base.
    """
    data: NDArray[np.uint8] = np.memmap(target, dtype=np.uint8, mode="r+")
    start = _start(delta, size_bytes=len(data))
    for frame in _frames(delta):
        match frame:
            case Part():
                _add(_values(data, frame, start), frame, delta)
            case EndedTensor(name=name, start=first, end=end, crc32=crc32):
                if zlib.crc32(data[first:end].data) != crc32:
                    raise DeltaError(f"tensor {name} does not have the checksum it should have")
            case _:
                raise DeltaError("a second start")
    assert isinstance(data, np.memmap)
    data.flush()


def _start(delta: BinaryIO, *, size_bytes: int) -> Start:
    """The first frame, of a file of this size."""
    start = _decoded(_frame(delta))
    if not isinstance(start, Start) or start.format != FORMAT:
        raise DeltaError(f"is no delta file of format {FORMAT}")
    if start.size_bytes != size_bytes:
        raise DeltaError(f"is for weights of {start.size_bytes} bytes, these have {size_bytes}")
    return start


def _frames(delta: BinaryIO) -> Iterator[Frame]:
    """The records up to the last."""
    while not isinstance(frame := _decoded(_frame(delta)), EndedFile):
        yield frame


def _frame(delta: BinaryIO) -> bytes:
    """The next frame's bytes."""
    length = delta.read(LENGTH.size)
    if len(length) < LENGTH.size:
        raise DeltaError("is cut short")
    (size_bytes,) = LENGTH.unpack(length)
    if size_bytes > FRAME_BYTES_MAX:
        raise DeltaError(f"a frame of {size_bytes} bytes, at most {FRAME_BYTES_MAX}")
    data = delta.read(size_bytes)
    if len(data) < size_bytes:
        raise DeltaError("is cut short")
    return data


def _decoded(data: bytes) -> Frame:
    try:
        frame: Frame = frames.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DeltaError(f"a record does not decode: {error}") from error
    return frame


def _values(data: NDArray[np.uint8], part: Part, start: Start) -> NDArray[np.uint8]:
    """The bytes of a part's values, which are behind the header."""
    end = part.start + part.values * part.value_bytes
    is_possible = part.value_bytes in (1, 2, 4, 8) and 0 <= part.changed <= part.values
    if not is_possible or not start.header_bytes <= part.start <= end <= len(data):
        raise DeltaError(f"has a part that no file of {len(data)} bytes has: {part}")
    return data[part.start : end]


def _add(values: NDArray[np.uint8], part: Part, delta: BinaryIO) -> None:
    """Take a part's two frames, and add what they say to its values."""
    where, by = _frame(delta), _frame(delta)
    base = integers(values, value_bytes=part.value_bytes)
    difference = unpacked(by, count=part.changed, value_bytes=part.value_bytes)
    if part.changed == part.values:
        base[:] = added(base, difference)
    else:
        changed = unpacked_places(where, count=part.changed, values=part.values)
        base[changed] = added(base[changed], difference)
