"""Whether a folder holds a model that a run can use; checked before anything starts."""

from pathlib import Path

import msgspec

from forgemq_contracts.run import MODEL_TYPES
from forgemq_launcher.core.configuration import ConfigurationError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class _ModelConfig(msgspec.Struct, frozen=True):
    """What the launcher reads of config.json."""

    model_type: str = ""


def check_model_folder(folder: Path) -> None:
    """Refuse a folder without a model that trains on trees.

    Raises:
        ConfigurationError: naming what is missing or not supported.
    """
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=_ModelConfig)
    except OSError as error:
        raise ConfigurationError(f"model.path: {folder} has no config.json") from error
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"model.path: {folder / 'config.json'}: {error}") from error
    if config.model_type not in MODEL_TYPES:
        raise ConfigurationError(
            f"model.path: {folder} has model_type {config.model_type!r}; "
            f"supported: {', '.join(MODEL_TYPES)}"
        )
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigurationError(f"model.path: {folder} has no tokenizer ({TOKENIZER_FILES[0]})")
    if not any(folder.glob("*.safetensors")):
        raise ConfigurationError(f"model.path: {folder} has no weights (*.safetensors)")
