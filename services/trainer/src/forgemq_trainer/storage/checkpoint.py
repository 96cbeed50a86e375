"""Checkpoints: a model in Hugging Face format, and all that continues training to the same bytes.

One folder for each step, `step-00000041`: the model's files, `optimizer/state.safetensors`
(moments, counts, fp32 masters, random state) and `trainer.json` (the record below); of a run with
speculation also a folder `head` with a draft head and its optimizer. Each of several ranks writes
its part of the state itself, `optimizer/part-00000.safetensors` and so on; any number of ranks
reads either. Of a run with adapters there is a folder `adapter` in place of the model's files, and
the record has the base model's checksum. A checkpoint is read back from the disk and its checksums
verified before trained-steps names it, and again on loading.

If a checkpoint is damaged and the log does not name it, the previous one is used, and the damaged
one gets another name, as its step is trained again. If the log names it, the trainer stops
(`PreviousLives.next_lineage`): the trees of the steps after the previous one may already be
deleted, so these steps could not be trained again.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
from torch import Tensor

from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.run_changes import check_changes
from forgemq_contracts.steps import TrainedStep
from forgemq_settings.environment import SettingsError
from forgemq_trainer.storage.adapters import ADAPTER_FILE, link_adapter
from forgemq_trainer.storage.folders import file_sha256, forget_cached, remove_folder, write_folder
from forgemq_trainer.storage.heads import fill_head
from forgemq_trainer.storage.optimizer_state import (
    RANDOM_STATE,
    StoredState,
    whole_parts,
    write_state_part,
)
from forgemq_trainer.storage.weights import WEIGHTS_FILE, WeightsFolder, link_model

OPTIMIZER_FILE = "optimizer/state.safetensors"
"""In a folder of its own: SGLang takes each safetensors file beside the model's for weights."""
_FILE_BESIDE_MODEL = "optimizer.safetensors"
"""Where earlier builds wrote it; their checkpoints are read too."""
RECORD_FILE = "trainer.json"
HEAD_FOLDER = "head"
ADAPTER_FOLDER = "adapter"
_HASHED_AT_ONCE = 8
"""Files of a checkpoint; one thread hashes about 1.5 GB/s, and a disk may read more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """Where training stands, besides weights and optimizer.

    Attributes:
        trained: The newest step's record, to be written again if the log lacks it.
        configuration: The run's.
        tree_positions: (partition, offset) of merged-trees from which to read on.
        reference_sha256: Of the model that the run started from, the reference of a loss that has
            one; "" if an earlier build began the run without a reference.
    """

    trained: TrainedStep
    configuration: RunConfiguration
    tree_positions: tuple[tuple[int, int], ...]
    reference_sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadState:
    """A draft head to save.

    Attributes:
        tensors: By the names in its file.
        optimizer: Its optimizer's state.
        base: Folder of the head that the run started with.
    """

    tensors: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    base: Path


class OptimizerPart(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of the optimizer's state.

    Attributes:
        file: Its path in the checkpoint's folder.
        sha256: Of the file.
    """

    file: str
    sha256: str


class CheckpointRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The content of a checkpoint's `trainer.json`, besides its own checksum.

    Attributes:
        run: Id of the run it belongs to.
        trained: The record of its step, to be written again if the log lacks it.
        configuration: The run's when it was saved.
        tree_positions: (partition, offset) of merged-trees from which to read on.
        weights_sha256: Of the model's file; with an adapter, of the base model.
        optimizer_sha256: Of the optimizer's file; "" if there are parts.
        optimizer_parts: The optimizer's files if several ranks wrote them.
        head_sha256: Of the draft head's file; "" without one.
        head_optimizer_sha256: Of the file of its optimizer.
        adapter_sha256: Of the adapter's file; "" if the checkpoint has a whole model.
        reference_sha256: As in `TrainingState`.
    """

    run: str
    trained: TrainedStep
    configuration: RunConfiguration
    tree_positions: tuple[tuple[int, int], ...]
    weights_sha256: str
    optimizer_sha256: str
    head_sha256: str = ""
    head_optimizer_sha256: str = ""
    adapter_sha256: str = ""
    reference_sha256: str = ""
    optimizer_parts: tuple[OptimizerPart, ...] = ()

    @property
    def optimizer_sha256_of_file(self) -> dict[str, str]:
        """The checksum of each file of the optimizer's state, by its path."""
        if self.optimizer_parts:
            return {part.file: part.sha256 for part in self.optimizer_parts}
        return {OPTIMIZER_FILE: self.optimizer_sha256}

    def sha256_of_file(self) -> dict[str, str]:
        """The checksum of each file of tensors, by its path in the checkpoint's folder."""
        files = dict(self.optimizer_sha256_of_file)
        if self.adapter_sha256:
            files[f"{ADAPTER_FOLDER}/{ADAPTER_FILE}"] = self.adapter_sha256
        else:
            files[WEIGHTS_FILE] = self.weights_sha256
        if self.head_sha256:
            files[f"{HEAD_FOLDER}/{WEIGHTS_FILE}"] = self.head_sha256
            files[f"{HEAD_FOLDER}/{OPTIMIZER_FILE}"] = self.head_optimizer_sha256
        return files


class _SealedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record with its own checksum, over its JSON without white space as it was written.

    A build whose records have more fields reads it too.
    """

    record: msgspec.Raw
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One checkpoint on disk whose checksums hold."""

    folder: Path
    record: CheckpointRecord

    @property
    def step(self) -> int:
        """The last step in it."""
        return self.record.trained.step

    def optimizer_state(self) -> StoredState:
        """The optimizer's state, without the random state; read tensor by tensor."""
        return StoredState(self._optimizer_files, without=frozenset({RANDOM_STATE}))

    @property
    def _optimizer_files(self) -> list[Path]:
        return [_placed(self.folder, file) for file in self.record.optimizer_sha256_of_file]

    @property
    def head_folder(self) -> Path:
        """Of its draft head, which is there if the run trains one."""
        return self.folder / HEAD_FOLDER

    @property
    def adapter_folder(self) -> Path:
        """Of its adapter, which is there in place of a model if the run trains one."""
        return self.folder / ADAPTER_FOLDER

    def head_optimizer_state(self) -> StoredState:
        """The state of the draft head's optimizer."""
        return StoredState([_placed(self.head_folder, OPTIMIZER_FILE)])

    def random_state(self) -> Tensor:
        """Read the state of torch's random generator."""
        return StoredState(self._optimizer_files)[RANDOM_STATE]


class OtherRunError(SettingsError):
    """The folder holds checkpoints of another run."""


class OtherConfigurationError(SettingsError):
    """The run's configuration differs from the one the checkpoint was trained with."""


class DamagedCheckpointError(OSError):
    """A checkpoint does not read back as it was written, or this rank cannot read it."""


def check_configuration(was: RunConfiguration, now: RunConfiguration) -> None:
    """Refuse to continue with a configuration that differs in a field which must stay.

    Raises:
        OtherConfigurationError: names the first such field, both values and the reason.
    """
    try:
        check_changes(was, now)
    except ValueError as error:
        raise OtherConfigurationError(str(error)) from error


def write_checkpoint(
    root: Path,
    state: TrainingState,
    *,
    weights: WeightsFolder,
    write_optimizer: Callable[[Path], Mapping[str, str]],
    head: HeadState | None = None,
) -> Path:
    """Write a checkpoint durably, read it back, and return its folder.

    Args:
        root: Folder of the run's checkpoints.
        state: Where training stands.
        weights: Of its version.
        write_optimizer: Writes the optimizer's files into a folder durably, reads them back and
            returns the checksum of each by its path there.
        head: The draft head, if the run trains one.

    Raises:
        DamagedCheckpointError: the disk holds other bytes than were written.
    """
    folder = root / f"step-{state.trained.step:08d}"
    optimizer: dict[str, str] = {}

    def fill(draft: Path) -> None:
        _link(weights, draft)
        (draft / OPTIMIZER_FILE).parent.mkdir()
        optimizer.update(write_optimizer(draft))
        if head is not None:
            _fill_head(draft / HEAD_FOLDER, head, dtype=state.configuration.model.dtype)
        record = CheckpointRecord(
            run=state.configuration.run,
            trained=state.trained,
            configuration=state.configuration,
            tree_positions=state.tree_positions,
            weights_sha256=weights.base_sha256 if weights.is_adapter else weights.sha256,
            optimizer_sha256=optimizer.get(OPTIMIZER_FILE, ""),
            optimizer_parts=_parts(optimizer),
            head_sha256="" if head is None else file_sha256(draft / HEAD_FOLDER / WEIGHTS_FILE),
            head_optimizer_sha256=""
            if head is None
            else file_sha256(draft / HEAD_FOLDER / OPTIMIZER_FILE),
            adapter_sha256=weights.sha256 if weights.is_adapter else "",
            reference_sha256=state.reference_sha256,
        )
        encoded = msgspec.json.encode(record)
        sealed = _SealedRecord(record=msgspec.Raw(encoded), sha256=_sha256(encoded))
        (draft / RECORD_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(sealed)))

    write_folder(folder, fill)
    # Read from the disk, not from the page cache, which would hide a failing disk.
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in optimizer:
            forget_cached(path)
    if _read_intact(folder, verified=frozenset(optimizer)) is None:
        raise DamagedCheckpointError(f"{folder} does not read back as it was written")
    return folder


def _link(weights: WeightsFolder, draft: Path) -> None:
    """Put published weights into a checkpoint: the adapter's folder, or the model's files."""
    if weights.is_adapter:
        link_adapter(weights.folder, draft / ADAPTER_FOLDER)
    else:
        link_model(weights.folder, draft)


def _parts(sha256_of_file: Mapping[str, str]) -> tuple[OptimizerPart, ...]:
    """The files that several ranks wrote; none if one rank wrote the whole state."""
    return tuple(
        OptimizerPart(file=file, sha256=sha256)
        for file, sha256 in sorted(sha256_of_file.items())
        if file != OPTIMIZER_FILE
    )


def checkpoints(root: Path, *, run: str) -> Iterator[Checkpoint | Path]:
    """The checkpoints in a folder, newest first; of a damaged one only its folder.

    Raises:
        OtherRunError: one belongs to another run.
    """
    if not root.exists():
        return
    for folder in sorted(root.glob("step-*"), reverse=True):
        found = _read_intact(folder)
        if found is not None and found.record.run != run:
            raise OtherRunError(
                f"{root} holds checkpoints of run {found.record.run}, this is {run}"
            )
        yield folder if found is None else found


def checkpoint_at(folder: Path, *, is_hashed: bool) -> Checkpoint:
    """Read the checkpoint in a folder that rank 0 named.

    Args:
        folder: The same for all ranks.
        is_hashed: False if a rank of this machine has verified the checksums of its files.

    Raises:
        DamagedCheckpointError: its checksums do not hold on this rank.
    """
    found = _read_intact(folder, has_hashed_files=is_hashed)
    if found is None:
        raise DamagedCheckpointError(f"rank 0 reads the checkpoint {folder}, this rank does not")
    return found


def set_aside_newer(root: Path, *, than: Checkpoint | None) -> None:
    """Rename the folders of later steps, for people to look at; without a checkpoint, all."""
    for folder in sorted(root.glob("step-*")):
        if than is None or folder.name > than.folder.name:
            aside = folder.with_name(f"damaged-{folder.name}")
            remove_folder(aside)
            folder.rename(aside)


def remove_older(root: Path, *, kept: int, pattern: str) -> None:
    """Keep the newest `kept` folders that match; names sort by age."""
    for folder in sorted(root.glob(pattern), reverse=True)[kept:]:
        remove_folder(folder)


def _fill_head(folder: Path, head: HeadState, *, dtype: str) -> None:
    folder.mkdir()
    fill_head(folder, head.tensors, base=head.base, dtype=dtype)
    file = folder / OPTIMIZER_FILE
    file.parent.mkdir()
    write_state_part(file, whole_parts(head.optimizer))


def _placed(folder: Path, file: str) -> Path:
    """Where a checkpoint has this file of tensors."""
    path = folder / file
    if path.exists() or not file.endswith(OPTIMIZER_FILE):
        return path
    return folder / file.replace(OPTIMIZER_FILE, _FILE_BESIDE_MODEL)


def _read_intact(
    folder: Path, *, verified: frozenset[str] = frozenset(), has_hashed_files: bool = True
) -> Checkpoint | None:
    """Read the checkpoint in a folder; None if its checksums do not hold.

    Args:
        folder: Of the checkpoint.
        verified: Files in it whose checksums need no check.
        has_hashed_files: False to check that of the record only.
    """
    try:
        sealed = msgspec.json.decode((folder / RECORD_FILE).read_bytes(), type=_SealedRecord)
        record = msgspec.json.decode(sealed.record, type=CheckpointRecord)
        written = msgspec.json.encode(msgspec.json.decode(sealed.record))
        expected = record.sha256_of_file() if has_hashed_files else {}
        is_whole = sealed.sha256 == _sha256(written) and _hold(
            folder, {name: each for name, each in expected.items() if name not in verified}
        )
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return Checkpoint(folder=folder, record=record) if is_whole else None


def _hold(folder: Path, sha256_of_file: Mapping[str, str]) -> bool:
    """Whether each file has its checksum."""
    paths = [_placed(folder, file) for file in sha256_of_file]
    with ThreadPoolExecutor(max_workers=_HASHED_AT_ONCE) as pool:
        return list(pool.map(file_sha256, paths)) == list(sha256_of_file.values())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
