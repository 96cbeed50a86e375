"""The optimizer's state in files: one of a trainer with one rank, else one for each rank's part.

A part's file says of each tensor what it is a part of, and where it begins there. So the state
can be read whole, or in the parts of another number of ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor

from forgemq_trainer.storage.folders import file_sha256, forget_cached, sync_file
from forgemq_trainer.storage.tensor_files import Piece, Place, StoredTensor, read_part, tensors_in
from forgemq_trainer.storage.tensor_writing import write_tensors

RANDOM_STATE = "torch|random"
"""Key of torch's random state among the optimizer's; no parameter's name holds a "|"."""
_WHOLES = "wholes"
"""Key in a file's metadata; tensors that it does not name are whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePart:
    """A rank's part of one tensor of the optimizer's state.

    Attributes:
        tensor: The part.
        start: Of its first value in the whole tensor.
        shape: Of the whole tensor.
    """

    tensor: Tensor
    start: Place
    shape: Place


class _Whole(msgspec.Struct, frozen=True, kw_only=True):
    """Where a part lies, as a file's metadata has it."""

    start: Place
    shape: Place


class DamagedFileError(OSError):
    """A file does not read back as it was written."""


def whole_parts(state: Mapping[str, Tensor]) -> dict[str, StatePart]:
    """The state of a trainer with one rank, whose part is all of it."""
    return {
        name: StatePart(tensor=tensor, start=(0,) * tensor.dim(), shape=tuple(tensor.shape))
        for name, tensor in state.items()
    }


def write_state_part(file: Path, parts: Mapping[str, StatePart]) -> str:
    """Write a rank's part durably, read it back, and return the file's SHA-256.

    Equal parts give equal bytes. Host memory holds one tensor besides those that are there.

    Raises:
        DamagedFileError: the disk holds other bytes than were written.
    """
    wholes = {
        name: _Whole(start=each.start, shape=each.shape)
        for name, each in parts.items()
        if tuple(each.tensor.shape) != each.shape
    }
    written = write_tensors(
        file,
        {name: each.tensor for name, each in parts.items()},
        metadata={_WHOLES: msgspec.json.encode(wholes, order="sorted").decode()},
    )
    sync_file(file)
    # Read from the disk, not from the page cache, which would hide a failing disk.
    forget_cached(file)
    if file_sha256(file) != written:
        raise DamagedFileError(f"{file} does not read back as it was written")
    return written


class StoredState(Mapping[str, Tensor]):
    """The optimizer's state in files; each tensor is read when it is asked for, and not kept."""

    def __init__(self, files: Sequence[Path], *, without: frozenset[str] = frozenset()) -> None:
        """Read the files' headers.

        Args:
            files: Together they hold each tensor whole, once.
            without: Names to leave out.

        Raises:
            StoredTensorsError: a file is no safetensors file.
            OSError: a file cannot be read.
        """
        self._pieces: dict[str, list[Piece]] = {}
        self._shapes: dict[str, Place] = {}
        for file in files:
            wholes = _wholes_of(file)
            for stored in tensors_in(file):
                if stored.name not in without:
                    self._add(stored, wholes.get(stored.name))

    def _add(self, stored: StoredTensor, whole: _Whole | None) -> None:
        start = (0,) * len(stored.shape) if whole is None else whole.start
        self._shapes[stored.name] = stored.shape if whole is None else whole.shape
        piece = Piece(stored=stored, start=start, shape=stored.shape)
        self._pieces.setdefault(stored.name, []).append(piece)

    def __getitem__(self, name: str) -> Tensor:
        dtype: torch.dtype = getattr(torch, self._pieces[name][0].stored.dtype)
        whole = torch.empty(self._shapes[name], dtype=dtype)
        self.read(name, into=whole, start=(0,) * whole.dim())
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def read(self, name: str, *, into: Tensor, start: Place) -> None:
        """Fill `into` with the part of a tensor that begins at `start`."""
        read_part(into, self._pieces[name], start=start)


def _wholes_of(file: Path) -> dict[str, _Whole]:
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata() or {}
    encoded = metadata.get(_WHOLES)
    return {} if encoded is None else msgspec.json.decode(encoded, type=dict[str, _Whole])
