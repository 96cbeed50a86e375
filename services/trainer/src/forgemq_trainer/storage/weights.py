"""Weights in Hugging Face format: one safetensors file, and the base model's other files verbatim.

The folder loads in stock transformers and in SGLang. Tensors have the names and shapes of the base
model's file, which may differ from those in memory.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from forgemq_contracts.weights import WeightsDelta
from forgemq_fp8_blocks import add_quantised
from forgemq_trainer.storage.folders import file_sha256, link_or_copy, write_folder

WEIGHTS_FILE = "model.safetensors"
UNSHARDED = "1000000GB"
"""Shard size for transformers above that of any model: the file stays one, as one checksum and one
broadcast order describe it."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json", ".gguf")
"""Of files of a model's folder that are weights, or name some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFolder:
    """Durable weights, and the checksum and size of their safetensors file.

    Attributes:
        folder: That this process reads.
        uri: That engines read: the same folder, or its copy in an object store; of a delta, the
            newest full copy there.
        base_sha256: Of a delta, that of the full copy; of an adapter, that of the base model; else
            "".
        deltas: What makes these weights of those at `uri`; () if they are the same.
        is_adapter: They are an adapter's, and the file is the adapter's.
    """

    folder: Path
    uri: str
    sha256: str
    size_bytes: int
    base_sha256: str = ""
    deltas: tuple[WeightsDelta, ...] = ()
    is_adapter: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedVersion:
    """A version in files.

    Attributes:
        version: Its number.
        weights: The policy's, as engines hold them.
        head: The draft head's if it is published with this version.
        whole: The policy's as training goes on from them; None if these are `weights`.
    """

    version: int
    weights: WeightsFolder
    head: WeightsFolder | None = None
    whole: WeightsFolder | None = None

    @property
    def checkpointed(self) -> WeightsFolder:
        """The policy's weights for a checkpoint."""
        return self.whole or self.weights

    @property
    def files(self) -> tuple[Path, ...]:
        """Files of tensors, in the order in which engines receive them."""
        folders = (self.weights,) if self.head is None else (self.weights, self.head)
        return tuple(each.folder / WEIGHTS_FILE for each in folders)

    @property
    def size_bytes(self) -> int:
        """Of all files of tensors."""
        return self.weights.size_bytes + (0 if self.head is None else self.head.size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeVersion:
    """Whole tensors of a version, as they are saved.

    Attributes:
        weights: All of the model by name; None if the trainer's model holds them so itself, or if
            nobody loads them.
        adapter: By the names in its file; empty without adapters.
    """

    weights: dict[str, Tensor] | None = None
    adapter: Mapping[str, Tensor] = field(default_factory=dict)


def read_weights_folder(folder: Path, *, sha256: str = "") -> WeightsFolder:
    """Read the checksum and size of the weights in a folder.

    Args:
        folder: Has them in one file.
        sha256: Its checksum, if it is known.

    Raises:
        FileNotFoundError: it has no single safetensors file.
    """
    file = folder / WEIGHTS_FILE
    size_bytes = file.stat().st_size
    return _weights_at(folder, sha256=sha256 or file_sha256(file), size_bytes=size_bytes)


def write_weights(
    model: nn.Module,
    *,
    base: Path,
    dtype: str,
    folder: Path,
    state: dict[str, Tensor] | None = None,
) -> WeightsFolder:
    """Write the model, to be synced by `sync_folder`; equal weights give equal bytes.

    Args:
        model: A causal language model of transformers.
        base: The run's base model; its configuration and tokenizer are copied.
        dtype: Of the parameters, as the configuration names it.
        folder: To write.
        state: All weights by name, if `model` holds only a shard of them.
    """

    def fill(draft: Path) -> None:
        copy_model_files(base, draft, dtype=dtype)
        with tempfile.TemporaryDirectory(dir=draft, prefix=".saved-") as saved:
            model.save_pretrained(saved, state_dict=state, max_shard_size=UNSHARDED)  # type: ignore[operator]  # transformers' method
            (Path(saved) / WEIGHTS_FILE).rename(draft / WEIGHTS_FILE)

    write_folder(folder, fill, is_synced=False)
    return read_weights_folder(folder)


def write_quantised(source: Path, *, dtype: str, folder: Path) -> WeightsFolder:
    """Write a model's weights as 8-bit floats in blocks, to be synced; equal ones, equal bytes.

    Args:
        source: The model in full.
        dtype: Of the tensors that stay as they are, as the configuration names it.
        folder: To write.

    Raises:
        NothingToQuantiseError: none of its tensors has whole blocks.
    """

    def fill(draft: Path) -> None:
        copy_model_files(source, draft, dtype=dtype)
        add_quantised(source, draft)

    write_folder(folder, fill, is_synced=False)
    return read_weights_folder(folder)


def link_weights(source: WeightsFolder, *, folder: Path) -> WeightsFolder:
    """Make `folder` hold the same weights, by hard links if possible."""

    def fill(draft: Path) -> None:
        link_model(source.folder, draft)

    write_folder(folder, fill)
    return _weights_at(folder, sha256=source.sha256, size_bytes=source.size_bytes)


def link_model(source: Path, target: Path) -> None:
    """Link a model's files, weights included, into an existing folder."""
    for path in _model_files(source):
        link_or_copy(path, target / path.name)
    link_or_copy(source / WEIGHTS_FILE, target / WEIGHTS_FILE)


def copy_model_files(base: Path, target: Path, *, dtype: str) -> None:
    """Copy all files but the weights, and set the configuration's dtype to that of training."""
    for path in _model_files(base):
        shutil.copyfile(path, target / path.name)
    configuration = target / "config.json"
    fields = json.loads(configuration.read_bytes())
    named = [name for name in ("dtype", "torch_dtype") if name in fields]
    if any(fields[name] != dtype for name in named):
        changed = {**fields, **dict.fromkeys(named, dtype)}
        configuration.write_text(json.dumps(changed, indent=2) + "\n")


def _weights_at(folder: Path, *, sha256: str, size_bytes: int) -> WeightsFolder:
    folder = folder.resolve()
    return WeightsFolder(folder=folder, uri=str(folder), sha256=sha256, size_bytes=size_bytes)


def _model_files(folder: Path) -> list[Path]:
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and not path.name.endswith(WEIGHT_SUFFIXES)
        and path.name not in ("trainer.json", "README.md")
    ]
