"""`python -m forgemq_trainer.merge_adapter ADAPTER FOLDER` writes a model with an adapter merged.

Reads the base model that the adapter names file by file, so that it holds one file at a time. This
is what `forgemq merge` runs.
"""

import shutil
import sys
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from forgemq_trainer.core.low_rank import factor_names, merged_weight
from forgemq_trainer.storage.adapters import (
    SETTINGS_FILE,
    AdapterSettings,
    model_sha256,
    named_base_sha256,
    read_adapter,
)
from forgemq_trainer.storage.folders import write_folder


class MergeError(Exception):
    """The folder or the base model does not allow it; says what and which."""


class _PeftSettings(AdapterSettings, frozen=True, kw_only=True):
    """Settings with which peft computes or trains more than alpha / r times B A, or beside what."""

    use_rslora: object = None
    use_dora: object = None
    rank_pattern: object = None
    alpha_pattern: object = None
    modules_to_save: object = None
    layer_replication: object = None
    fan_in_fan_out: object = None
    init_lora_weights: object = True


INITIALISATIONS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Those of peft that leave the base model as it is. The others take B A from its weights, so that
the adapter belongs to what is left of them and not to the model that it names."""

_OFF = (
    set(_PeftSettings.__struct_fields__)
    - set(AdapterSettings.__struct_fields__)
    - {"init_lora_weights"}
)


def merge_adapter(adapter: Path, folder: Path) -> int:
    """Write the merged model; returns how many layers the adapter changed.

    Args:
        adapter: Its folder, as the trainer or peft writes it.
        folder: To write; it must not exist.

    Raises:
        MergeError: the folder exists, there is no such adapter, or it does not fit its base model.
    """
    if folder.exists():
        raise MergeError(f"{folder} exists; name another folder")
    settings, factors = _read(adapter)
    base = Path(settings.base_model_name_or_path)
    files = sorted(base.glob("*.safetensors"))
    if not files:
        raise MergeError(
            f"{adapter / SETTINGS_FILE}: base_model_name_or_path {base} has no weights"
        )
    _check_base(adapter, base)
    merged = 0

    def fill(draft: Path) -> None:
        nonlocal merged
        for path in sorted(base.iterdir()):
            if path.is_file() and path not in files and not path.name.startswith("."):
                shutil.copyfile(path, draft / path.name)
        for path in files:
            try:
                tensors = load_file(path)
            except SafetensorError as error:
                raise MergeError(f"{path}: {error}") from error
            merged += _merge(tensors, factors, scale=settings.lora_alpha / settings.r)
            save_file(tensors, draft / path.name, metadata={"format": "pt"})
        if 2 * merged != len(factors):
            raise MergeError(
                f"{adapter} is for {len(factors) // 2} layers, of which {base} has {merged}"
            )

    write_folder(folder, fill)
    return merged


def _check_base(adapter: Path, base: Path) -> None:
    """Refuse a base model of other weights than those that the adapter was trained beside."""
    trained_on = named_base_sha256(adapter)
    if trained_on and (found := model_sha256(base)) != trained_on:
        raise MergeError(
            f"{adapter / SETTINGS_FILE}: base_model_name_or_path {base} has sha256 {found}, and "
            f"the adapter was trained on a model with sha256 {trained_on}: name that model"
        )


def _read(adapter: Path) -> tuple[AdapterSettings, dict[str, Tensor]]:
    """An adapter's settings and factors.

    Raises:
        MergeError: there is none, it is damaged, or it is more than a product of two factors.
    """
    try:
        settings = msgspec.json.decode((adapter / SETTINGS_FILE).read_bytes(), type=_PeftSettings)
        factors = read_adapter(adapter)
    except (OSError, msgspec.MsgspecError, SafetensorError) as error:
        raise MergeError(f"{adapter} has no adapter: {error}") from error
    used = [name for name in sorted(_OFF) if getattr(settings, name)]
    if settings.r < 1 or settings.bias != "none":
        used.append("r" if settings.r < 1 else "bias")
    if used:
        raise MergeError(
            f"{adapter / SETTINGS_FILE}: {used[0]} is {getattr(settings, used[0])!r}: only an "
            "adapter that adds lora_alpha / r times B A, and nothing else, can be merged"
        )
    if (name := settings.init_lora_weights) not in INITIALISATIONS:
        raise MergeError(
            f"{adapter / SETTINGS_FILE}: init_lora_weights is {name!r}: such an adapter was "
            "trained beside a changed base model, which is not the one that it names"
        )
    return settings, factors


def _merge(tensors: dict[str, Tensor], factors: dict[str, Tensor], *, scale: float) -> int:
    """Add the factors' products to these tensors, in place; returns to how many.

    Raises:
        MergeError: a product has another shape than its tensor.
    """
    merged = 0
    for name, tensor in tensors.items():
        a_name, b_name = factor_names(name.removesuffix(".weight"))
        if a_name in factors and b_name in factors:
            a, b = factors[a_name], factors[b_name]
            made = (*b.shape[:1], *a.shape[1:])
            if made != tensor.shape or b.shape[1:] != a.shape[:1]:
                raise MergeError(
                    f"{name} of the base model has shape {tuple(tensor.shape)}, the adapter's "
                    f"factors are {tuple(a.shape)} and {tuple(b.shape)}"
                )
            tensors[name] = merged_weight(tensor, a, b, scale=scale)
            merged += 1
    return merged


def main() -> int:
    """Merge what the command line names; returns the exit status."""
    if len(sys.argv) != 3:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    try:
        merged = merge_adapter(Path(sys.argv[1]), Path(sys.argv[2]))
    except MergeError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{merged} layers merged\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
