"""What does it cost ranks to write their optimizer's state, in our files and in torch's?

Two ranks hold a state of 48 tensors in shards, 192 MiB each, and write it to a disk in each way:

- `parts`: a safetensors file for each rank, as the trainer writes it (`ranks/part_saving.py`);
- `dcp`: torch's distributed checkpoint (`async_save`);
- `dcp_safetensors`: the same with its writer of safetensors files.

Each writes twice, in processes of its own, and the second time counts; memory counts both times.
`held_up_s` is how long a rank waits until its next step may begin, `durable_s` how long until all
is written and synced, and of `parts` also read back; `durable_over_dcp` compares that. `memory` is
the peak of a rank's resident memory beyond what it held before, over the bytes of its state.
`read_s` is how long ranks need to read their parts again, those of `parts` with the files'
checksums. `noticed` is the share of changed bytes that a reader notices: four in each file, one
after the other.

    make load NAME=checkpoint_formats      # 2 minutes on two busy cores
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch
from measurement import Measurement, arguments
from msgspec import Struct
from rank_processes import on_ranks
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from forgemq_trainer.ranks.part_saving import PartSaving
from forgemq_trainer.ranks.ranks import Ranks
from forgemq_trainer.storage.folders import file_sha256
from forgemq_trainer.storage.optimizer_state import StatePart, StoredState

_WORLD = 2
_TENSORS = 48
_ROWS, _WIDTH = 1024, 1024
_CHANGES = 4
"""Bytes that are changed in each file, one after the other, at even distances."""

_UNITS = {
    "held_up_s": "s",
    "durable_s": "s",
    "memory": "of the state",
    "read_s": "s",
    "noticed": "of the changes",
}

State: TypeAlias = dict[str, Tensor]
"""This rank's shards."""


class Saved(Struct, frozen=True, kw_only=True):
    """What one rank measured; seconds, and a share of its state's bytes."""

    held_up_s: float
    durable_s: float
    memory: float
    read_s: float
    noticed: float


class Parts:
    """The trainer's own files."""

    def __init__(self, ranks: Ranks, folder: Path, state: State) -> None:
        self._ranks, self._folder, self._state = ranks, folder, state
        self._saving = PartSaving(ranks, self._parts)
        self._sha256_of_file: dict[str, str] = {}

    def _parts(self) -> dict[str, StatePart]:
        start, shape = (self._ranks.rank * _ROWS, 0), (_WORLD * _ROWS, _WIDTH)
        return {
            name: StatePart(tensor=shard, start=start, shape=shape)
            for name, shard in self._state.items()
        }

    def begin(self) -> None:
        """Let all ranks write beside what follows."""
        self._saving.begin()

    def finish(self) -> None:
        """Wait until all have written."""
        if self._ranks.rank == 0:
            (self._folder / "optimizer").mkdir()
            self._sha256_of_file = self._saving.lead(self._folder)
        else:
            self._saving.finish()

    def read(self, into: State) -> None:
        """Fill this rank's shards."""
        files = sorted((self._folder / "optimizer").iterdir())
        file_sha256(files[self._ranks.rank])  # Rank 0 has what it must be.
        stored = StoredState(files)
        for name, shard in into.items():
            stored.read(name, into=shard, start=(self._ranks.rank * _ROWS, 0))

    def notices(self, file: Path) -> bool:
        """Whether a restart refuses the changed file; asked of rank 0."""
        name = file.relative_to(self._folder).as_posix()
        return file_sha256(file) != self._sha256_of_file[name]


class Distributed:
    """Torch's distributed checkpoint."""

    def __init__(self, folder: Path, state: State, *, is_safetensors: bool) -> None:
        self._folder, self._state = folder, state
        self._is_safetensors = is_safetensors
        self._mesh = init_device_mesh("cpu", (_WORLD,))

    def _sharded(self, state: State) -> dict[str, DTensor]:
        return {
            name: DTensor.from_local(shard, self._mesh, [Shard(0)]) for name, shard in state.items()
        }

    def begin(self) -> None:
        """Copy the state, and let it be written beside what follows."""
        writer = None
        if self._is_safetensors:
            writer = HuggingFaceStorageWriter(str(self._folder), save_distributed=True)
        self._writing = async_save(
            self._sharded(self._state), checkpoint_id=self._folder, storage_writer=writer
        )

    def finish(self) -> None:
        """Wait until all have written."""
        self._writing.result()  # type: ignore[union-attr]  # a future of the thread

    def read(self, into: State) -> None:
        """Fill this rank's shards."""
        reader = HuggingFaceStorageReader(str(self._folder)) if self._is_safetensors else None
        load(self._sharded(into), checkpoint_id=self._folder, storage_reader=reader)

    def notices(self, _file: Path) -> bool:
        """Whether a rank that reads alone refuses the folder with the changed file."""
        reader = HuggingFaceStorageReader(str(self._folder)) if self._is_safetensors else None
        whole = {name: torch.empty((_WORLD * _ROWS, _WIDTH)) for name in self._state}
        try:
            load(whole, checkpoint_id=self._folder, storage_reader=reader, no_dist=True)
        except CheckpointException:
            return True
        return False


Way: TypeAlias = Callable[[Ranks, Path, State], Parts | Distributed]

WAYS: dict[str, Way] = {
    "parts": Parts,
    "dcp": lambda _, folder, state: Distributed(folder, state, is_safetensors=False),
    "dcp_safetensors": lambda _, folder, state: Distributed(folder, state, is_safetensors=True),
}


def _state(rank: int) -> State:
    generator = torch.Generator().manual_seed(rank)
    return {
        f"layers.{n}|exp_avg": torch.randn((_ROWS, _WIDTH), generator=generator)
        for n in range(_TENSORS)
    }


def _resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def _noticed(way: Parts | Distributed, folder: Path) -> float:
    """The share of changed bytes that are noticed, one after the other; on rank 0."""
    # Of files that hold values; DCP's index is no such file.
    files = [file for file in folder.rglob("*") if file.is_file() and file.stat().st_size > 2**20]
    places = [
        (file, n * file.stat().st_size // (_CHANGES + 1))
        for file in files
        for n in range(1, _CHANGES + 1)
    ]
    noticed = 0
    for file, place in places:
        _flip(file, place)
        noticed += way.notices(file)
        _flip(file, place)
    return noticed / len(places)


def _flip(file: Path, place: int) -> None:
    """Change a bit of the byte at this place; twice is as before."""
    with file.open("r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ 1]))


def _measured(ranks: Ranks, name: str, root: Path) -> Saved:
    state = _state(ranks.rank)
    Path("/proc/self/clear_refs").write_text("5")  # The peak begins again from what is held now.
    before = _resident_bytes("VmRSS")
    _saved(name, ranks, root / "first", state)
    folder = root / "second"
    way, held_up_s, durable_s = _saved(name, ranks, folder, state)
    memory = _resident_bytes("VmHWM") - before
    again = {key: torch.zeros_like(shard) for key, shard in state.items()}
    _meet(ranks)
    begun_s = time.monotonic()
    way.read(again)
    read_s = time.monotonic() - begun_s
    if not all(torch.equal(shard, again[key]) for key, shard in state.items()):
        raise AssertionError(f"{name}: another state was read than was written")
    _meet(ranks)
    noticed = _noticed(way, folder) if ranks.rank == 0 else 0.0
    _meet(ranks)
    return Saved(
        held_up_s=held_up_s,
        durable_s=durable_s,
        memory=memory / sum(shard.nbytes for shard in state.values()),
        read_s=read_s,
        noticed=noticed,
    )


def _saved(
    name: str, ranks: Ranks, folder: Path, state: State
) -> tuple[Parts | Distributed, float, float]:
    """Write once; returns the way with what it wrote, and the two times, in seconds."""
    if ranks.rank == 0:
        folder.mkdir()
    way = WAYS[name](ranks, folder, state)
    _meet(ranks)
    begun_s = time.monotonic()
    way.begin()
    held_up_s = time.monotonic() - begun_s
    way.finish()
    return way, held_up_s, time.monotonic() - begun_s


def _meet(ranks: Ranks) -> None:
    ranks.all_reduce(torch.zeros(1))


def main() -> int:
    """Measure each way."""
    chosen = arguments(__doc__ or "")
    state_mib = _TENSORS * _ROWS * _WIDTH * 4 // 2**20
    measurement = Measurement(
        name="checkpoint_formats",
        question="What does it cost ranks to write their optimizer's state?",
        conditions={"state": f"{_WORLD} ranks, {state_mib} MiB each, {_TENSORS} tensors"},
    )
    durable_s: dict[str, float] = {}
    for name in WAYS:
        if not chosen.case or name in chosen.case:
            with tempfile.TemporaryDirectory() as temporary:
                saved = on_ranks(_measured, name, Path(temporary), world=_WORLD)
            for metric, unit in _UNITS.items():
                worst = max(getattr(each, metric) for each in saved)
                measurement.row(name, metric, worst, unit)
            durable_s[name] = max(each.durable_s for each in saved)
    if {"parts", "dcp"} <= durable_s.keys():
        ratio = durable_s["parts"] / durable_s["dcp"]
        measurement.row("parts", "durable_over_dcp", ratio, "x")
    return measurement.finish(chosen.json)


if __name__ == "__main__":
    sys.exit(main())
