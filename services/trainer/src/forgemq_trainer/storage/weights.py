"""Weights in Hugging Face format: one safetensors file, and the base model's other files verbatim.

The folder loads in stock transformers and in SGLang. Names and shapes are those of the base
model's file format, whatever the model calls them in memory.
"""

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from forgemq_trainer.storage.folders import file_sha256, link_or_copy, write_folder

WEIGHTS_FILE = "model.safetensors"
UNSHARDED = "1000000GB"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json", ".gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFolder:
    """Durable weights, and the checksum and size of their safetensors file.

    Attributes:
        folder: where this process reads them.
        uri: where engines read them; the same folder, or its copy in an object store.
    """

    folder: Path
    uri: str
    sha256: str
    size_bytes: int


def described(folder: Path) -> WeightsFolder:
    """The weights in a folder.

    Raises:
        FileNotFoundError: it has no single safetensors file.
    """
    file = folder / WEIGHTS_FILE
    return _weights_at(folder, sha256=file_sha256(file), size_bytes=file.stat().st_size)


def write_weights(
    model: nn.Module,
    *,
    base: Path,
    dtype: str,
    place: Path,
    state: dict[str, Tensor] | None = None,
) -> WeightsFolder:
    """Write the model durably; equal weights give equal bytes.

    Args:
        model: of transformers.
        base: the folder it was loaded from first; its configuration and tokenizer are copied.
        dtype: of the model's parameters, as its configuration names it.
        place: of the folder.
        state: of the model, where the model itself only has a shard of it.
    """

    def fill(draft: Path) -> None:
        copy_model_files(base, draft, dtype=dtype)
        with tempfile.TemporaryDirectory(dir=draft, prefix=".saved-") as saved:
            model.save_pretrained(saved, state_dict=state, max_shard_size=UNSHARDED)  # type: ignore[operator]  # transformers' method
            (Path(saved) / WEIGHTS_FILE).rename(draft / WEIGHTS_FILE)

    write_folder(place, fill)
    return described(place)


def link_weights(source: WeightsFolder, *, place: Path) -> WeightsFolder:
    """The same weights at another place."""

    def fill(draft: Path) -> None:
        link_model(source.folder, draft)

    write_folder(place, fill)
    return _weights_at(place, sha256=source.sha256, size_bytes=source.size_bytes)


def link_model(source: Path, target: Path) -> None:
    """Link a model's files, weights included, into an existing folder."""
    for path in _model_files(source):
        link_or_copy(path, target / path.name)
    link_or_copy(source / WEIGHTS_FILE, target / WEIGHTS_FILE)


def copy_model_files(base: Path, target: Path, *, dtype: str) -> None:
    """Copy everything but weights; the configuration's dtype becomes the trained one."""
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
        and not path.name.endswith(_WEIGHT_SUFFIXES)
        and path.name not in ("trainer.json", "README.md")
    ]
