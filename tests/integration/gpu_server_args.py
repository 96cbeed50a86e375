"""`python gpu_server_args.py GPU`: what SGLang makes of command lines on GPUs that are not there.

Reads a JSON list of command lines, writes a JSON list of resolved options; fails if SGLang refuses
one of them. What SGLang asks of the driver is answered here: that 8 GPUs of one kind are there.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch


class Gpu(NamedTuple):
    """What SGLang asks the driver for."""

    name: str
    capability: tuple[int, int]
    memory_mib: int


GPUS = {
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 81_559),
    "b200": Gpu("NVIDIA B200", (10, 0), 183_359),
}


def pretend(gpu: Gpu) -> None:
    """Answer the probes of SGLang as a machine with 8 of these GPUs does."""
    answers = _answers(gpu)
    with _set(torch.cuda, answers), _set(torch.accelerator, {"is_available": lambda: True}):
        # It decides for the platform of these GPUs.
        from sglang.srt.utils import common
    # On a GPU these would load kernels, which need the driver.
    import sglang.srt.model_loader
    import sglang.srt.server_args  # noqa: F401

    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    common.get_nvgpu_memory_capacity = lambda: gpu.memory_mib
    for probe in vars(common).values():
        if hasattr(probe, "cache_clear"):
            probe.cache_clear()


@contextmanager
def _set(module: ModuleType, values: Mapping[str, object]) -> Iterator[None]:
    """Names of a module with other values while the block runs."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    yield
    for name, value in before.items():
        setattr(module, name, value)


def _answers(gpu: Gpu) -> dict[str, Callable[..., Any]]:
    major, minor = gpu.capability
    properties = SimpleNamespace(major=major, minor=minor, name=gpu.name)
    return {
        "is_available": lambda: True,
        "device_count": lambda: 8,
        "current_device": lambda: 0,
        "get_device_capability": lambda _device=None: gpu.capability,
        "get_device_name": lambda _device=None: gpu.name,
        "get_device_properties": lambda _device=None: properties,
    }


def resolved(command: list[str]) -> dict[str, Any]:
    """Every option after SGLang has filled in and checked them."""
    from sglang.srt.server_args import prepare_server_args

    arguments = prepare_server_args(command)
    arguments.resolve_once()
    options: dict[str, Any] = arguments.resolved_dict()
    return options


if __name__ == "__main__":
    pretend(GPUS[sys.argv[1]])
    options = [resolved(command) for command in json.load(sys.stdin)]
    sys.stdout.write(json.dumps(options, default=str))
