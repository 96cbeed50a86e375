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
    ADAPTER_FILE,
    SETTINGS_FILE,
    model_sha256,
    named_base_sha256,
    read_adapter,
)
from forgemq_trainer.storage.folders import write_folder
from forgemq_trainer.storage.tensor_files import (
    INDEX_FILE,
    StoredTensorsError,
    tensors_of_folder,
)
from forgemq_trainer.storage.weights import WEIGHT_SUFFIXES, WEIGHTS_FILE


class MergeError(Exception):
    """The folder or the base model does not allow it; says what and which."""


class _PeftSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of peft's settings.

    `target_modules` is not: a list, a pattern or nothing, it says where the factors are, and their
    names say it too.
    """

    base_model_name_or_path: str
    r: int
    lora_alpha: float
    bias: str = "none"
    peft_type: str = "LORA"
    init_lora_weights: object = True
    alora_invocation_tokens: object = None
    alpha_pattern: object = None
    arrow_config: object = None
    fan_in_fan_out: object = None
    layer_replication: object = None
    lora_bias: object = None
    modules_to_save: object = None
    rank_pattern: object = None
    use_bdlora: object = None
    use_dora: object = None
    use_qalora: object = None
    use_rslora: object = None


INITIALISATIONS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Those of peft that leave the base model as it is. The others take B A from its weights, so that
the adapter belongs to what is left of them and not to the model that it names."""

_OFF = tuple(field.name for field in msgspec.structs.fields(_PeftSettings) if field.default is None)
"""Settings with which peft computes or trains more than alpha / r times B A, for some of the tokens
alone, or beside what."""


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
    files = _files(adapter, base)
    _check_base(adapter, base)
    left = dict(factors)
    merged = 0

    def fill(draft: Path) -> None:
        nonlocal merged
        for path in sorted(base.iterdir()):
            # Weights in another form than the model's own are not merged, so they are left out.
            is_other = path.name.startswith(".") or path.name.endswith(WEIGHT_SUFFIXES)
            is_index = path.name == INDEX_FILE and base / WEIGHTS_FILE not in files
            if path.is_file() and (is_index or not is_other):
                shutil.copyfile(path, draft / path.name)
        for path in files:
            try:
                tensors = load_file(path)
            except SafetensorError as error:
                raise MergeError(f"{path}: {error}") from error
            merged += _merge(tensors, left, settings=settings)
            save_file(tensors, draft / path.name, metadata={"format": "pt"})
        if left:
            raise MergeError(
                f"{adapter} has {next(iter(left))}, which with another is no pair of factors of a "
                f"layer of {base}"
            )

    write_folder(folder, fill)
    return merged


def _files(adapter: Path, base: Path) -> list[Path]:
    """The files of the base model's weights.

    Raises:
        MergeError: it has none, or not all that its index names.
    """
    try:
        return sorted({stored.file for stored in tensors_of_folder(base).values()})
    except StoredTensorsError as error:
        raise MergeError(
            f"{adapter / SETTINGS_FILE}: base_model_name_or_path {base} has no weights: {error}"
        ) from error


def _check_base(adapter: Path, base: Path) -> None:
    """Refuse a base model of other weights than those that the adapter was trained beside."""
    trained_on = named_base_sha256(adapter)
    if trained_on and (found := model_sha256(base)) != trained_on:
        raise MergeError(
            f"{adapter / SETTINGS_FILE}: base_model_name_or_path {base} has sha256 {found}, and "
            f"the adapter was trained on a model with sha256 {trained_on}: name that model"
        )


def _read(adapter: Path) -> tuple[_PeftSettings, dict[str, Tensor]]:
    """An adapter's settings and factors.

    Raises:
        MergeError: there is none, it is damaged, or it is more than a product of two factors.
    """
    try:
        settings = msgspec.json.decode((adapter / SETTINGS_FILE).read_bytes(), type=_PeftSettings)
        factors = read_adapter(adapter)
    except (OSError, msgspec.MsgspecError, SafetensorError) as error:
        raise MergeError(f"{adapter} has no adapter: {error}") from error
    used = [name for name in _OFF if getattr(settings, name)]
    wanted = {"r": settings.r >= 1, "bias": settings.bias == "none"}
    wanted["peft_type"] = settings.peft_type == "LORA"
    used += [name for name, is_so in wanted.items() if not is_so]
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
    if not factors:
        raise MergeError(f"{adapter / ADAPTER_FILE} has no tensors")
    return settings, factors


def _merge(
    tensors: dict[str, Tensor], factors: dict[str, Tensor], *, settings: _PeftSettings
) -> int:
    """Add the factors' products to these tensors, in place; returns to how many.

    Args:
        tensors: Of the base model.
        factors: Of the adapter; those that are used are taken out.
        settings: Of the adapter.

    Raises:
        MergeError: a product has another shape than its tensor, or another rank than the adapter.
    """
    merged = 0
    for name, tensor in tensors.items():
        a_name, b_name = factor_names(name.removesuffix(".weight"))
        if a_name in factors and b_name in factors:
            a, b = factors.pop(a_name), factors.pop(b_name)
            made = (*b.shape[:1], *a.shape[1:])
            if made != tensor.shape or b.shape[1:] != a.shape[:1]:
                raise MergeError(
                    f"{name} of the base model has shape {tuple(tensor.shape)}, the adapter's "
                    f"factors are {tuple(a.shape)} and {tuple(b.shape)}"
                )
            if len(a) != settings.r:
                raise MergeError(
                    f"{a_name} has {len(a)} rows, and {SETTINGS_FILE} has r {settings.r}"
                )
            tensors[name] = merged_weight(tensor, a, b, scale=settings.lora_alpha / settings.r)
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
