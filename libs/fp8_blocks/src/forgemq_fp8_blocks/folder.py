"""A model's folder in the format of Hugging Face: the quantised one from the full one.

Tensors go from file to file, a slab of rows at a time, so memory does not grow with the model.
"""

import json
import math
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from forgemq_fp8_blocks.config import quantisation
from forgemq_fp8_blocks.plan import SCALE_SUFFIX, plan
from forgemq_fp8_blocks.values import BLOCK, quantised

WEIGHTS_FILE = "model.safetensors"
SLAB_VALUES = 16 * 1024 * 1024
"""Of a matrix, in memory at once: 64 MB of float32 and some copies of it."""

_INDEX_FILE = "model.safetensors.index.json"
_ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "I16": 2,
} | dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1)


class _Slice(Protocol):
    """A tensor in a file, of which rows are read when they are asked for."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, rows: slice) -> Tensor: ...


class _File(Protocol):
    """A file of tensors."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> _Slice: ...


class _Place(NamedTuple):
    """A tensor of the new file: dtype as in its header, and its first byte after that."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """One past its last byte."""
        return self.offset + math.prod(self.shape) * _ITEM_BYTES[self.dtype]


def quantise_model(source: Path, folder: Path) -> None:
    """Make `folder` a quantised copy of the model in `source`, with its tokenizer.

    Raises:
        FileExistsError: the folder exists.
        FileNotFoundError: `source` has no config.json, or no weights.
        NothingToQuantiseError: no projection has whole blocks.
    """
    folder.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and not _is_of_weights(path.name):
            shutil.copyfile(path, folder / path.name)
    add_quantised(source, folder)


def add_quantised(source: Path, folder: Path, *, slab_values: int = SLAB_VALUES) -> None:
    """Write the quantised weights of `source` into a folder that has the model's other files.

    Its config.json then names the format. Equal weights give equal bytes.

    Args:
        source: The model in full.
        folder: With the other files.
        slab_values: Of a matrix, in memory at once.

    Raises:
        FileNotFoundError: there is no config.json, or `source` has no weights.
        NothingToQuantiseError: no projection has whole blocks.
    """
    config_path = folder / "config.json"
    config: dict[str, Any] = json.loads(config_path.read_bytes())
    tensors = {
        name: tensor
        for path in _weight_files(source)
        for name, tensor in _tensors(safe_open(path, "pt"))
    }
    chosen = plan({name: each.get_shape() for name, each in tensors.items()})
    with (folder / WEIGHTS_FILE).open("wb") as out:
        _write(tensors, chosen.quantised, out, slab_values=slab_values)
    config["quantization_config"] = quantisation(chosen.left)
    config_path.write_text(json.dumps(config, indent=2) + "\n")


def _tensors(file: _File) -> Iterator[tuple[str, _Slice]]:
    for name in file.keys():  # noqa: SIM118 - it is no mapping
        yield name, file.get_slice(name)


def _write(
    tensors: Mapping[str, _Slice], chosen: frozenset[str], out: BinaryIO, *, slab_values: int
) -> None:
    places = _places(tensors, chosen)
    header = json.dumps(
        {"__metadata__": {"format": "pt"}}
        | {
            name: {"dtype": at.dtype, "shape": at.shape, "data_offsets": [at.offset, at.end]}
            for name, at in places.items()
        },
        separators=(",", ":"),
    ).encode()
    header += b" " * (-len(header) % 8)
    out.write(struct.pack("<Q", len(header)) + header)
    values_start = out.tell()
    for name, tensor in tensors.items():
        out.seek(values_start + places[name].offset)
        if name in chosen:
            scales = _write_quantised(_slabs(tensor, values_max=slab_values), out)
            out.seek(values_start + places[name + SCALE_SUFFIX].offset)
            out.write(_bytes(scales))
        else:
            for slab in _slabs(tensor, values_max=slab_values):
                out.write(_bytes(slab))


def _write_quantised(slabs: Iterable[Tensor], out: BinaryIO) -> Tensor:
    """Write the 8-bit floats; returns the scales."""
    scales = []
    for slab in slabs:
        values, scale = quantised(slab)
        out.write(_bytes(values))
        scales.append(scale)
    return torch.cat(scales)


def _places(tensors: Mapping[str, _Slice], chosen: frozenset[str]) -> dict[str, _Place]:
    """Where each tensor lies: large items first, so that all are aligned, then by name."""
    sizes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, tensor in tensors.items():
        shape = tuple(tensor.get_shape())
        sizes[name] = ("F8_E4M3" if name in chosen else tensor.get_dtype(), shape)
        if name in chosen:
            sizes[name + SCALE_SUFFIX] = ("F32", tuple(size // BLOCK for size in shape))
    places: dict[str, _Place] = {}
    offset = 0
    for name in sorted(sizes, key=lambda name: (-_ITEM_BYTES[sizes[name][0]], name)):
        places[name] = _Place(*sizes[name], offset)
        offset = places[name].end
    return places


def _slabs(tensor: _Slice, *, values_max: int) -> Iterator[Tensor]:
    """The tensor in runs of rows, each of whole blocks: one block high, or of `values_max`."""
    shape = tensor.get_shape()
    if not shape:
        yield tensor[:]
        return
    row_values = max(1, math.prod(shape[1:]))
    rows = max(BLOCK, values_max // row_values // BLOCK * BLOCK)
    for start in range(0, shape[0], rows):
        yield tensor[start : start + rows]


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _weight_files(source: Path) -> list[Path]:
    """Files with the model's tensors, each tensor in one of them."""
    index = source / _INDEX_FILE
    if index.is_file():
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        return [source / name for name in sorted(names)]
    if (source / WEIGHTS_FILE).is_file():
        return [source / WEIGHTS_FILE]
    raise FileNotFoundError(f"{source} has no {WEIGHTS_FILE} and no {_INDEX_FILE}")


def _is_of_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf"))
