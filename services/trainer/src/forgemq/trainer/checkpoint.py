"""Checkpoints: a model in Hugging Face format, and all that continues training to the same bytes.

One folder a step, `step-00000041`: the model's files, `optimizer.safetensors` (moments, counts,
fp32 masters, random state) and `trainer.json` (the record below). Checksums are verified on
loading; a damaged checkpoint is passed over for the one before it.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forgemq.contracts.run import RunConfiguration
from forgemq.contracts.steps import TrainedStep
from forgemq.trainer.folders import file_sha256, remove_folder, write_folder
from forgemq.trainer.weights import WEIGHTS_FILE, WeightsFolder, link_model

OPTIMIZER_FILE = "optimizer.safetensors"
RECORD_FILE = "trainer.json"
RANDOM_STATE = "torch|random"


class CheckpointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says about itself.

    Attributes:
        run: id of the run it belongs to.
        trained: the record of its step, to be written again if the log lacks it.
        configuration_sha256: of the run's configuration at that time.
        tree_positions: (partition, offset) of merged-trees from which to read on.
        weights_sha256: of the model's file.
        optimizer_sha256: of the optimizer's file.
    """

    run: str
    trained: TrainedStep
    configuration_sha256: str
    tree_positions: tuple[tuple[int, int], ...]
    weights_sha256: str
    optimizer_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One checkpoint on disk whose checksums hold."""

    folder: Path
    record: CheckpointRecord

    @property
    def step(self) -> int:
        """The last step in it."""
        return self.record.trained.step

    def optimizer_state(self) -> dict[str, Tensor]:
        """State of the optimizer, without the random state."""
        tensors = load_file(self.folder / OPTIMIZER_FILE)
        return {name: tensor for name, tensor in tensors.items() if name != RANDOM_STATE}

    def random_state(self) -> Tensor:
        """State of torch's generator."""
        return load_file(self.folder / OPTIMIZER_FILE)[RANDOM_STATE]


class OtherRunError(ValueError):
    """The folder holds checkpoints of another run."""


def configuration_sha256(configuration: RunConfiguration) -> str:
    """Checksum of a run's configuration."""
    return hashlib.sha256(msgspec.json.encode(configuration, order="deterministic")).hexdigest()


def write_checkpoint(
    root: Path,
    *,
    weights: WeightsFolder,
    optimizer: dict[str, Tensor],
    trained: TrainedStep,
    configuration: RunConfiguration,
    tree_positions: tuple[tuple[int, int], ...],
) -> Path:
    """Write the checkpoint of a step durably; returns its folder."""
    place = root / f"step-{trained.step:08d}"

    def fill(draft: Path) -> None:
        link_model(weights.folder, draft)
        tensors = {name: tensor.cpu().contiguous() for name, tensor in optimizer.items()}
        save_file({**tensors, RANDOM_STATE: torch.get_rng_state()}, draft / OPTIMIZER_FILE)
        record = CheckpointRecord(
            run=configuration.run,
            trained=trained,
            configuration_sha256=configuration_sha256(configuration),
            tree_positions=tree_positions,
            weights_sha256=weights.sha256,
            optimizer_sha256=file_sha256(draft / OPTIMIZER_FILE),
        )
        (draft / RECORD_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(record)))

    write_folder(place, fill)
    return place


def checkpoints(root: Path, *, run: str) -> Iterator[Checkpoint | Path]:
    """Checkpoints, newest first; the folder alone where one is damaged.

    Raises:
        OtherRunError: one belongs to another run.
    """
    if not root.exists():
        return
    for folder in sorted(root.glob("step-*"), reverse=True):
        try:
            data = (folder / RECORD_FILE).read_bytes()
            record = msgspec.json.decode(data, type=CheckpointRecord)
            is_whole = (
                file_sha256(folder / WEIGHTS_FILE) == record.weights_sha256
                and file_sha256(folder / OPTIMIZER_FILE) == record.optimizer_sha256
            )
        except (OSError, msgspec.MsgspecError):
            yield folder
            continue
        if record.run != run:
            raise OtherRunError(f"{root} holds checkpoints of run {record.run}, this is {run}")
        yield Checkpoint(folder=folder, record=record) if is_whole else folder


def remove_older(root: Path, *, kept: int, pattern: str) -> None:
    """Keep the newest `kept` folders that match; names sort by age."""
    for folder in sorted(root.glob(pattern), reverse=True)[kept:]:
        remove_folder(folder)
