"""Whether folders hold a model and a draft that a run can use; checked before anything starts."""

from pathlib import Path
from typing import Any

import msgspec

from forgemq_contracts.draft_head import HEAD_CLASS, HEAD_FILE, head_shape, is_head
from forgemq_contracts.model_families import MODEL_TYPES, refusal
from forgemq_contracts.speculation import Speculation
from forgemq_launcher.core.configuration import ConfigurationError, Document

ADAPTER_FILE = "adapter_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class _TextConfig(msgspec.Struct, frozen=True):
    """What the launcher reads of config.json about a language model."""

    max_position_embeddings: int | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    """The name of `dtype` before transformers 4.56."""


class _ModelConfig(_TextConfig, frozen=True):
    """What the launcher reads of config.json."""

    model_type: str = ""
    quantization_config: dict[str, Any] | None = None
    text_config: _TextConfig | None = None


def own_settings(folder: Path) -> Document:
    """Table `model` of a run with this model as its own config.json describes it.

    The context is all its positions, and float32 stays float32.

    Raises:
        ConfigurationError: it has no config.json, or a damaged one.
    """
    table: Document = {"path": str(folder)}
    config = _config_of(folder)
    text = config.text_config or config
    if text.max_position_embeddings is not None:
        table["context_tokens_max"] = text.max_position_embeddings
    if "float32" in (text.dtype, text.torch_dtype, config.dtype, config.torch_dtype):
        table["dtype"] = "float32"
    return table


def check_model_folder(folder: Path) -> None:
    """Refuse a folder without a model that trains on trees.

    Raises:
        ConfigurationError: naming what is missing or not supported.
    """
    config = _config_of(folder)
    if config.model_type not in MODEL_TYPES:
        raise ConfigurationError(
            f"model.path: {folder} has model_type {config.model_type!r}, which is "
            f"{refusal(config.model_type)}"
        )
    check_model_files(folder)


def check_model_files(folder: Path) -> None:
    """Refuse a folder without a model, of whatever family, in full.

    Raises:
        ConfigurationError: naming what is missing or not supported.
    """
    config = _config_of(folder)
    if config.quantization_config is not None:
        method = config.quantization_config.get("quant_method", "unnamed")
        raise ConfigurationError(
            f"model.path: {folder} is quantised itself (quantization_config.quant_method "
            f"{method}); its weights are needed in full, and model.engine_quantization says how "
            "engines hold them"
        )
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigurationError(f"model.path: {folder} has no tokenizer ({TOKENIZER_FILES[0]})")
    if not any(folder.glob("*.safetensors")):
        raise ConfigurationError(f"model.path: {folder} has no weights (*.safetensors)")


def _config_of(folder: Path) -> _ModelConfig:
    try:
        return msgspec.json.decode((folder / "config.json").read_bytes(), type=_ModelConfig)
    except OSError as error:
        if (folder / ADAPTER_FILE).is_file() or (folder / "adapter" / ADAPTER_FILE).is_file():
            raise ConfigurationError(
                f"model.path: {folder} has an adapter and no model: `forgemq merge` writes one"
            ) from error
        raise ConfigurationError(f"model.path: {folder} has no config.json") from error
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"model.path: {folder / 'config.json'}: {error}") from error


def check_draft_folder(speculation: Speculation, *, model: Path) -> None:
    """Refuse a folder without a head of the model's sizes, or a small model with its vocabulary.

    Raises:
        ConfigurationError: naming what is missing or does not fit.
    """
    if speculation.head:
        _check_head_folder(Path(speculation.head), model=model)
    else:
        _check_small_model(Path(speculation.model), model=model)


def _check_small_model(folder: Path, *, model: Path) -> None:
    if not any(folder.glob("*.safetensors")):
        raise ConfigurationError(f"speculation.model: {folder} has no weights (*.safetensors)")
    try:
        small = head_shape((folder / "config.json").read_bytes())
        policy = head_shape((model / "config.json").read_bytes())
    except OSError as error:
        raise ConfigurationError(f"speculation.model: {folder} has no config.json") from error
    except ValueError as error:
        raise ConfigurationError(f"speculation.model: {folder}: {error}") from error
    if small.vocabulary_size != policy.vocabulary_size:
        raise ConfigurationError(
            f"speculation.model: {folder} has vocabulary_size {small.vocabulary_size}, the model "
            f"has {policy.vocabulary_size}"
        )


def _check_head_folder(folder: Path, *, model: Path) -> None:
    try:
        config = (folder / "config.json").read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"speculation.head: {folder} has no config.json; `forgemq new-head` writes a head"
        ) from error
    if not is_head(config):
        raise ConfigurationError(f"speculation.head: {folder} has no {HEAD_CLASS}")
    if not (folder / HEAD_FILE).is_file():
        raise ConfigurationError(f"speculation.head: {folder} has no {HEAD_FILE}")
    try:
        head, policy = head_shape(config), head_shape((model / "config.json").read_bytes())
    except ValueError as error:
        raise ConfigurationError(f"speculation.head: {error}") from error
    for name in ("hidden_size", "vocabulary_size"):
        if getattr(head, name) != getattr(policy, name):
            raise ConfigurationError(
                f"speculation.head: {folder} has {name} {getattr(head, name)}, the model has "
                f"{getattr(policy, name)}"
            )
