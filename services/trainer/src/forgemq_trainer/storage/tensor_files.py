"""The tensors in safetensors files, and parts of tensors that lie in pieces over several of them.

A part is read from mapped files, which are closed with it: its pages do not stay in the process.
"""

import contextlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from torch import Tensor

from forgemq_contracts.weight_buckets import (
    TensorSpec,
    header_bytes,
    tensor_ranges,
    tensor_specs,
)
from forgemq_settings.environment import SettingsError
from forgemq_trainer.storage.weights import WEIGHTS_FILE

INDEX_FILE = "model.safetensors.index.json"

Range: TypeAlias = tuple[int, int]
"""First byte of a tensor's values in a file, and one past the last."""

Place: TypeAlias = tuple[int, ...]
"""An index of one value, or a size, for each dimension of a tensor."""


class StoredTensorsError(SettingsError):
    """The tensors in a folder are not those of its model; says which tensor and the rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in a file; `dtype` as torch names it, for example bfloat16."""

    file: Path
    name: str
    dtype: str
    shape: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stored tensor that is a part of a whole one.

    Example: an expert's [24, 32] in the [4, 48, 32] of a layer has start (2, 24, 0), shape
    (1, 24, 32).

    Attributes:
        stored: It may lack leading dimensions in which its shape is 1.
        start: Of its first value in the whole tensor.
        shape: In the whole tensor.
    """

    stored: StoredTensor
    start: Place
    shape: Place


def tensors_in(file: Path) -> tuple[StoredTensor, ...]:
    """The tensors of one safetensors file, from its header.

    Raises:
        StoredTensorsError: it is no safetensors file or has not all of its bytes, or a dtype is
            unknown.
        OSError: it cannot be read.
    """
    try:
        with file.open("rb") as opened:
            start = opened.read(8)
            start += opened.read(header_bytes(start) - len(start))
        specs = tensor_specs(start)
        _check_ranges(specs, tensor_ranges(start), header_end=len(start), file=file)
    except ValueError as error:
        raise StoredTensorsError(f"{file}: {error}") from error
    return tuple(
        StoredTensor(file=file, name=spec.name, dtype=spec.dtype, shape=spec.shape)
        for spec in specs
    )


def _check_ranges(
    specs: Iterable[TensorSpec], ranges: dict[str, Range], *, header_end: int, file: Path
) -> None:
    """Refuse a file that lacks values of a tensor, as one does that was copied in part.

    Raises:
        ValueError: says what is wrong.
    """
    for spec in specs:
        first, end = ranges[spec.name]
        if end - first != spec.size_bytes:
            raise ValueError(
                f"tensor {spec.name} of {spec.size_bytes} bytes lies in {end - first} of them"
            )
    wanted = max((end for _, end in ranges.values()), default=header_end)
    if (size := file.stat().st_size) != wanted:
        raise ValueError(
            f"the file has {size} bytes and by its header {wanted}: it was copied in part, or "
            "damaged"
        )


def tensors_of_folder(folder: Path) -> dict[str, StoredTensor]:
    """The model's tensors in a folder of Hugging Face format, by name: one file, or an index's.

    Raises:
        StoredTensorsError: the folder has no weights, a tensor is in two files, or in none although
            the index names it.
    """
    files = [folder / WEIGHTS_FILE]
    named: dict[str, str] = {}
    if not files[0].exists():
        named = _named_in_index(folder / INDEX_FILE)
        files = [folder / file for file in sorted(set(named.values()))]
    found: dict[str, StoredTensor] = {}
    for file in files:
        if not file.exists():
            raise StoredTensorsError(
                f"{folder}: {INDEX_FILE} names {file.name}, which is not there"
            )
        for stored in tensors_in(file):
            if (other := found.get(stored.name)) is not None:
                raise StoredTensorsError(
                    f"{folder}: tensor {stored.name} is in {other.file.name} and in {file.name}"
                )
            found[stored.name] = stored
    for name, file_name in named.items():
        if name not in found or found[name].file.name != file_name:
            raise StoredTensorsError(
                f"{folder}: {INDEX_FILE} names tensor {name} in {file_name}, which does not have it"
            )
    return found


def read_part(into: Tensor, pieces: Iterable[Piece], *, start: Sequence[int]) -> None:
    """Fill `into` with the part of a whole tensor that begins at `start`.

    Converts to the dtype and device of `into`. Pieces outside of the part are not read.

    Args:
        into: Of the part's shape.
        pieces: Of the whole tensor.
        start: Of the part's first value.
    """
    if not into.numel():
        return
    with contextlib.ExitStack() as opened:
        files: dict[Path, Any] = {}
        for piece in pieces:
            ends = [a + n for a, n in zip(piece.start, piece.shape, strict=True)]
            part_ends = [a + n for a, n in zip(start, into.shape, strict=True)]
            low = [max(pair) for pair in zip(piece.start, start, strict=True)]
            high = [min(pair) for pair in zip(ends, part_ends, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            file = piece.stored.file
            if file not in files:
                files[file] = opened.enter_context(safe_open(file, framework="pt"))
            source = _part_of_piece(files[file], piece, low=low, high=high)
            target = into[_slices(low, high, start)]
            with torch.no_grad():
                target.copy_(source.reshape(target.shape))


def _part_of_piece(file: Any, piece: Piece, *, low: list[int], high: list[int]) -> Tensor:  # noqa: ANN401  # safetensors has no types
    """A view of the mapped file; it is valid while that is open."""
    absent = len(piece.shape) - len(piece.stored.shape)
    wanted = _slices(low, high, piece.start)[absent:]
    stored = file.get_slice(piece.stored.name)
    # safetensors takes no empty index, which a tensor of no dimensions would have.
    part: Tensor = stored[wanted] if wanted else file.get_tensor(piece.stored.name)
    return part


def _slices(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))


def _named_in_index(file: Path) -> dict[str, str]:
    """The file name of each tensor, as an index has it."""
    if not file.exists():
        raise StoredTensorsError(
            f"{file.parent} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; weights in other formats "
            "are not read"
        )
    try:
        named = json.loads(file.read_bytes())["weight_map"]
        return {str(name): str(file_name) for name, file_name in named.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoredTensorsError(f"{file} is no index of safetensors files: {error!r}") from error
