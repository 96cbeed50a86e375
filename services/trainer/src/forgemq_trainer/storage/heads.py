"""Draft heads on disk: the folder that engines load, one file of tensors and its config.json."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from forgemq_trainer.storage.folders import write_folder
from forgemq_trainer.storage.weights import (
    WEIGHTS_FILE,
    WeightsFolder,
    copy_model_files,
    read_weights_folder,
)


def write_head(
    tensors: Mapping[str, Tensor], *, base: Path, dtype: str, folder: Path
) -> WeightsFolder:
    """Write a head, to be synced by `sync_folder`; equal tensors give equal bytes.

    Args:
        tensors: By the names in the head's file.
        base: The head that the run started with; its config.json is copied.
        dtype: Of the tensors, as the configuration names it.
        folder: To write.
    """

    def fill(draft: Path) -> None:
        fill_head(draft, tensors, base=base, dtype=dtype)

    write_folder(folder, fill, is_synced=False)
    return read_weights_folder(folder)


def fill_head(folder: Path, tensors: Mapping[str, Tensor], *, base: Path, dtype: str) -> None:
    """Write a head's files into an existing folder."""
    copy_model_files(base, folder, dtype=dtype)
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(held, folder / WEIGHTS_FILE, metadata={"format": "pt"})
