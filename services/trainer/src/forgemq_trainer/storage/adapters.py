"""Adapters on disk, as the package peft writes them: a file of tensors and its settings.

The same folder loads in peft and in SGLang. It names the base model and does not hold it.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from forgemq_contracts.lora import Lora
from forgemq_trainer.storage.folders import file_sha256, link_or_copy, write_folder
from forgemq_trainer.storage.tensor_writing import write_tensors
from forgemq_trainer.storage.weights import WEIGHTS_FILE, WeightsFolder

ADAPTER_FILE = "adapter_model.safetensors"
SETTINGS_FILE = "adapter_config.json"

BASE_SHA256 = "base_model_sha256"
"""Key of the base model's checksum in the header of the tensors. Not in the settings, which are
peft's: readers of those need not take a field that peft does not have."""


class AdapterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `adapter_config.json`, with peft's names."""

    base_model_name_or_path: str
    r: int
    lora_alpha: float
    target_modules: tuple[str, ...]
    peft_type: str = "LORA"
    task_type: str = "CAUSAL_LM"
    bias: str = "none"
    lora_dropout: float = 0.0
    inference_mode: bool = True


def write_adapter(
    tensors: Mapping[str, Tensor], *, lora: Lora, base: Path, base_sha256: str, folder: Path
) -> WeightsFolder:
    """Write an adapter, to be synced by `sync_folder`; equal tensors give equal bytes.

    Args:
        tensors: By the names in its file.
        lora: Of the run.
        base: Of the base model.
        base_sha256: Its checksum.
        folder: To write.
    """
    write_folder(
        folder,
        lambda draft: fill_adapter(draft, tensors, lora=lora, base=base, base_sha256=base_sha256),
        is_synced=False,
    )
    file = folder / ADAPTER_FILE
    return WeightsFolder(
        folder=folder.resolve(),
        uri=str(folder.resolve()),
        sha256=file_sha256(file),
        size_bytes=file.stat().st_size,
        base_sha256=base_sha256,
        is_adapter=True,
    )


def fill_adapter(
    folder: Path, tensors: Mapping[str, Tensor], *, lora: Lora, base: Path, base_sha256: str
) -> None:
    """Write an adapter's files into an existing folder."""
    settings = AdapterSettings(
        base_model_name_or_path=str(base.resolve()),
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=lora.targets,
    )
    encoded = msgspec.json.format(msgspec.json.encode(settings), indent=2)
    (folder / SETTINGS_FILE).write_bytes(encoded + b"\n")
    metadata = {"format": "pt", BASE_SHA256: base_sha256}
    write_tensors(folder / ADAPTER_FILE, tensors, metadata=metadata)


def link_adapter(source: Path, target: Path) -> None:
    """Link an adapter's files into a new folder."""
    target.mkdir()
    for name in (SETTINGS_FILE, ADAPTER_FILE):
        link_or_copy(source / name, target / name)


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """The tensors of the adapter in a folder."""
    return load_file(folder / ADAPTER_FILE)


def named_base_sha256(folder: Path) -> str:
    """Checksum of the base model that the adapter in a folder was trained on; "" if it names none.

    Adapters that the trainer writes name it, those of peft do not.
    """
    with safe_open(folder / ADAPTER_FILE, framework="pt") as opened:
        named: Mapping[str, str] = opened.metadata() or {}
    return named.get(BASE_SHA256, "")


def model_sha256(folder: Path) -> str:
    """Checksum of a model: of its one file of weights, or of the names and checksums of several."""
    if (folder / WEIGHTS_FILE).exists():
        return file_sha256(folder / WEIGHTS_FILE)
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {file_sha256(path)}\n".encode())
    return digest.hexdigest()
