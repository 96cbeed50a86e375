"""Finds a device and a memory budget for the trainer of a run, if the user names none."""

import math
from collections.abc import Mapping
from pathlib import Path

import msgspec

from forgemq_contracts.lane_engines import every_lane, gpus_of
from forgemq_contracts.run import RunConfiguration
from forgemq_launcher.core.gpus import visible_gpus
from forgemq_launcher.core.trainer_place import Memory, memory_budget_bytes, trainer_device
from forgemq_launcher.upkeep.machine import free_gpu_bytes, installed_gpus
from forgemq_settings.memory import available_memory_bytes

DEVICE = "FORGEMQ_TRAINER_DEVICE"
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


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
        Memory(free_bytes=free_bytes, parameters=parameters_of(Path(configuration.model.path))),
        device=device,
        ranks=trainer.world_size,
        dtype=configuration.model.dtype,
        usual_bytes=trainer.memory_budget_bytes,
    )
    if not budget:
        return configuration
    trainer = msgspec.structs.replace(trainer, memory_budget_bytes=budget)
    return msgspec.structs.replace(configuration, trainer=trainer)


def parameters_of(folder: Path) -> int:
    """Parameters in a model's safetensors files, by their headers."""
    return sum(_elements(file) for file in folder.glob("*.safetensors"))


def _elements(file: Path) -> int:
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = msgspec.json.decode(opened.read(size), type=dict[str, _Tensor])
    total = 0
    for name, tensor in header.items():
        count = 0 if name == "__metadata__" else 1
        total += count * math.prod(tensor.shape)
    return total


class _Tensor(msgspec.Struct, frozen=True):
    """What the header of a safetensors file says of a tensor, as far as it is read here."""

    shape: tuple[int, ...] = ()
