"""Finds a device and a memory budget for the trainer of a run, if the user names none."""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from forgemq_contracts.lane_engines import every_lane, gpus_of
from forgemq_contracts.lora import Lora
from forgemq_contracts.rank_rules import shard_ranks_of
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.speculation import trained_head
from forgemq_contracts.weight_buckets import header_bytes
from forgemq_launcher.core.configuration import ConfigurationError
from forgemq_launcher.core.gpus import visible_gpus
from forgemq_launcher.core.trainer_place import (
    Memory,
    frozen_copies,
    memory_budget_bytes,
    trainer_device,
)
from forgemq_launcher.upkeep.machine import free_gpu_bytes, installed_gpus
from forgemq_settings.memory import available_memory_bytes

DEVICE = "FORGEMQ_TRAINER_DEVICE"
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
"""A decoder layer in the name of a stored tensor, by its number."""


def device_of(configuration: RunConfiguration, environ: Mapping[str, str]) -> str:
    """The trainer's device: as named, else what this machine has beside the run's engines."""
    if environ.get(DEVICE):
        return environ[DEVICE]
    seen = visible_gpus(installed_gpus(), cuda_visible_devices=environ.get(VISIBLE_GPUS))
    engines = 0 if environ.get("FORGEMQ_ENGINE_URL") else gpus_of_engines(configuration)
    return trainer_device(engines=engines, gpus=seen, ranks=configuration.trainer.world_size)


def gpus_of_engines(configuration: RunConfiguration) -> int:
    """GPUs that the engines of all lanes take."""
    if not configuration.lanes:
        return configuration.log.lanes
    return sum(gpus_of(lane) for lane in every_lane(configuration.lanes))


def with_budget(
    configuration: RunConfiguration, environ: Mapping[str, str], *, device: str
) -> RunConfiguration:
    """The configuration with the memory budget that this machine has for it.

    It stays as it is if nothing is left, or if the GPU does not tell: then the default holds, and
    the trainer names the least budget that its longest episode needs.
    """
    free_bytes = (
        available_memory_bytes()
        if device == "cpu"
        else free_gpu_bytes(cuda_visible_devices=environ.get(VISIBLE_GPUS))
    )
    if free_bytes is None:
        return configuration
    trainer = configuration.trainer
    budget = memory_budget_bytes(
        _memory(configuration, free_bytes=free_bytes, device=device),
        device=device,
        ranks=trainer.world_size,
        shard_ranks=shard_ranks_of(trainer),
        dtype=configuration.model.dtype,
        usual_bytes=trainer.memory_budget_bytes,
    )
    if not budget:
        return configuration
    trainer = msgspec.structs.replace(trainer, memory_budget_bytes=budget)
    return msgspec.structs.replace(configuration, trainer=trainer)


def parameters_of(folder: Path) -> int:
    """Parameters of the model in a folder, by the headers of its files.

    What else the files have is not the trainer's: the head of a model that ties it, as that of
    Qwen3-0.6B, layers that predict several tokens ahead, and the same weights in another form.
    """
    return sum(math.prod(shape) for _, shape in _shapes(folder))


def adapter_parameters_of(folder: Path, lora: Lora) -> int:
    """Parameters of the adapters that a run trains of a model, by the headers of its files.

    Experts have none, however they are stored.
    """
    return sum(
        lora.rank * sum(shape)
        for name, shape in _shapes(folder)
        if name.removesuffix(".weight").rpartition(".")[2] in lora.targets
        and len(shape) == 2
        and ".experts." not in name
    )


def _memory(configuration: RunConfiguration, *, free_bytes: int, device: str) -> Memory:
    folder, lora = Path(configuration.model.path), configuration.lora
    trained = trained_head(configuration.speculation)
    whole = parameters_of(folder)
    copies = frozen_copies(lora, device=device, ranks=configuration.trainer.world_size)
    return Memory(
        free_bytes=free_bytes,
        parameters=whole if lora is None else adapter_parameters_of(folder, lora),
        frozen_parameters=copies * whole,
        reference_parameters=whole if configuration.loss.reference_weight else 0,
        head_parameters=0 if trained is None else parameters_of(Path(trained.head)),
    )


def _shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors that make the model in a folder.

    Raises:
        ConfigurationError: names a file without a whole header, or one that cannot be read as what
            its name says.
    """
    config = _decoded(folder / CONFIG_FILE, type=_Config)
    for file in _files(folder):
        try:
            with file.open("rb") as opened:
                start = opened.read(8)
                header = opened.read(header_bytes(start) - len(start))
            tensors = msgspec.json.decode(header, type=dict[str, _Tensor])
        except ValueError as error:  # Of msgspec too.
            raise ConfigurationError(
                f"{file} is no safetensors file, or was copied in part: {error}"
            ) from error
        for name, tensor in tensors.items():
            if name != "__metadata__" and config.has(name):
                yield name, tensor.shape


def _files(folder: Path) -> list[Path]:
    """The files that the trainer reads of a folder: one, or those of an index."""
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    named = set(_decoded(folder / INDEX_FILE, type=_Index).weight_map.values())
    # A file that is named and absent the trainer refuses by its name.
    return [file for file in sorted(folder.glob("*.safetensors")) if file.name in named]


Decoded = TypeVar("Decoded", bound=msgspec.Struct)


def _decoded(file: Path, *, type: type[Decoded]) -> Decoded:
    """What a file of JSON has of a type's fields; their defaults if there is no such file."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=type)
    except FileNotFoundError:
        return type()
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"{file}: {error}") from error


class _Config(msgspec.Struct, frozen=True):
    """What is read of a config.json to know the model's own tensors."""

    num_hidden_layers: int | None = None
    tie_word_embeddings: bool | None = None

    def has(self, name: str) -> bool:
        """Whether a stored tensor is one of the model's parameters."""
        if name == "lm_head.weight":
            return not self.tie_word_embeddings
        layer = LAYER.search(name)
        count = self.num_hidden_layers
        return layer is None or count is None or int(layer.group(1)) < count


class _Index(msgspec.Struct, frozen=True):
    """An index of the files that a model is stored in."""

    weight_map: dict[str, str] = {}


class _Tensor(msgspec.Struct, frozen=True):
    """What the header of a safetensors file says of a tensor, as far as it is read here."""

    shape: tuple[int, ...] = ()
