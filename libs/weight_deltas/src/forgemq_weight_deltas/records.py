"""The records of a delta file, and the errors of those who write and read one.

A delta file is a row of frames, each behind its length as a 64-bit little-endian integer. The first
is `Start`. Every `Part` is followed by two frames: where its changed values are, and by how much
each differs. `EndedTensor` follows the last part of a tensor that changed; `EndedFile` is the last
frame, so that a file that was cut short is seen.
"""

import struct
from typing import TypeAlias

import msgspec

FORMAT = 1

LENGTH = struct.Struct("<Q")

FRAME_BYTES_MAX = 2**30
"""Of one frame, before and after compression: far above those of a part."""


class DeltaError(Exception):
    """A delta file is damaged, or belongs to other weights."""


class OtherLayoutError(Exception):
    """Two files of weights have other tensors, or the same at other places."""


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """What the delta belongs to.

    Attributes:
        header_bytes: Size of both files' headers, which are the same bytes.
        size_bytes: Size of both files.
    """

    format: int = FORMAT
    header_bytes: int
    size_bytes: int


class Part(msgspec.Struct, frozen=True, kw_only=True, tag="part"):
    """Some consecutive values of one tensor, of which at least one changed.

    Attributes:
        start: First byte in the file.
        values: How many values there are.
        value_bytes: Of each.
        changed: How many changed; `values` if all are written, changed or not.
    """

    start: int
    values: int
    value_bytes: int
    changed: int


class EndedTensor(msgspec.Struct, frozen=True, kw_only=True, tag="tensor"):
    """A tensor that changed, whole.

    Attributes:
        crc32: Of the new bytes in [start, end).
    """

    name: str
    start: int
    end: int
    crc32: int


class EndedFile(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """Nothing follows."""


Frame: TypeAlias = Start | Part | EndedTensor | EndedFile

frames = msgspec.msgpack.Decoder(Frame)


class DeltaFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a delta has: values of all tensors, those that changed, and its own size."""

    values: int
    changed: int
    size_bytes: int
