"""Writes a random draft head for a model."""

import hashlib
import math
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec

from forgemq_contracts.arrays import pack_floats
from forgemq_contracts.draft_head import (
    HEAD_FILE,
    bound_of_new,
    head_config,
    head_shape,
    head_tensors,
)
from forgemq_launcher.core.configuration import ConfigurationError

_DRAW_MAX = 2**32
_DRAWS_AT_ONCE = 2**20
"""Numbers drawn together: 4 MB of them, so that a large head takes little memory."""


def write_new_head(model: Path, folder: Path, *, seed: int) -> int:
    """Write a head whose numbers follow from the seed; returns how many it has.

    Raises:
        ConfigurationError: the model has no usable config.json, or the folder has a head already.
    """
    if (folder / HEAD_FILE).exists():
        raise ConfigurationError(f"{folder} has {HEAD_FILE} already; name another folder")
    try:
        shape = head_shape((model / "config.json").read_bytes())
    except FileNotFoundError as error:
        raise ConfigurationError(f"{model} has no config.json") from error
    except ValueError as error:
        raise ConfigurationError(f"{model}: {error}") from error
    tensors = head_tensors(shape)
    folder.mkdir(parents=True, exist_ok=True)
    written = msgspec.json.format(msgspec.json.encode(head_config(shape)), indent=2)
    (folder / "config.json").write_bytes(written + b"\n")
    with (folder / HEAD_FILE).open("wb") as file:
        file.write(_header(tensors))
        for name, sizes in tensors.items():
            for part in _values(name, sizes, seed=seed):
                file.write(part)
    return sum(map(math.prod, tensors.values()))


def _header(tensors: dict[str, tuple[int, ...]]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, sizes in tensors.items():
        end = start + 4 * math.prod(sizes)
        entries[name] = {"dtype": "F32", "shape": sizes, "data_offsets": (start, end)}
        start = end
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % 8)  # The format wants the values aligned.
    return len(header).to_bytes(8, "little") + header


def _values(name: str, sizes: tuple[int, ...], *, seed: int) -> Iterator[bytes]:
    """The little-endian values of one tensor, in parts."""
    if len(sizes) == 1:
        yield pack_floats([0.0 if name.endswith("bias") else 1.0]) * sizes[0]
        return
    bound, count = bound_of_new(sizes), math.prod(sizes)
    for first in range(0, count, _DRAWS_AT_ONCE):
        length = min(_DRAWS_AT_ONCE, count - first)
        digest = hashlib.shake_256(f"{seed}/{name}/{first}".encode()).digest(4 * length)
        drawn = struct.unpack(f"<{length}I", digest)
        yield pack_floats(bound * (2 * (each / _DRAW_MAX) - 1) for each in drawn)
