"""The flags of an engine with a pool, and what a CPU needs for it."""

import json

import torch

from forgemq_sglang_cpu.host_cache import copy_tokens
from forgemq_sglang_cpu.options import EngineOptions, command_line
from forgemq_sglang_cpu.pool import EnginePool, arguments

FILE = EnginePool(storage="file", folder="/pool", folder_gb_max=1.5)
STORE = EnginePool(
    storage="mooncake", extra_config="@/store.json", page_tokens=64, host_gb=100, prefetch="timeout"
)


def value_of(flags: list[str], name: str) -> str:
    return flags[flags.index(name) + 1]


def test_an_engine_without_a_pool_has_none_of_its_flags() -> None:
    command = command_line(EngineOptions(), model_path="m", host="127.0.0.1", port=7)
    assert not [flag for flag in command if "hi" in flag or flag == "--page-size"]


def test_engines_on_a_cpu_share_a_bounded_folder() -> None:
    command = command_line(EngineOptions(pool=FILE), model_path="m", host="127.0.0.1", port=7)
    assert "--enable-hierarchical-cache" in command
    config = json.loads(value_of(command, "--hicache-storage-backend-extra-config"))
    assert config == {"file_storage_path": "/pool", "max_size": 1_500_000_000}
    assert value_of(command, "--hicache-mem-layout") == "layer_first"
    assert value_of(command, "--hicache-io-backend") == "direct"
    assert value_of(command, "--hicache-ratio") == "2"
    assert "--hicache-size" not in command


def test_engines_on_gpus_get_the_storage_as_it_is_configured_and_sglangs_own_layout() -> None:
    flags = arguments(STORE, has_gpu=True)
    assert value_of(flags, "--hicache-storage-backend") == "mooncake"
    assert value_of(flags, "--hicache-storage-backend-extra-config") == "@/store.json"
    assert (value_of(flags, "--page-size"), value_of(flags, "--hicache-size")) == ("64", "100")
    assert "--hicache-mem-layout" not in flags
    assert "--hicache-ratio" not in flags


def test_tokens_are_copied_to_the_slots_of_the_other_tier_and_no_others() -> None:
    source = [torch.arange(12.0).reshape(6, 2), -torch.arange(12.0).reshape(6, 2)]
    target = [torch.zeros(4, 2), torch.zeros(4, 2)]
    copy_tokens(source, target, torch.tensor([5, 1]), torch.tensor([0, 3]), 1)
    assert target[0].tolist() == [[10, 11], [0, 0], [0, 0], [2, 3]]
    assert target[1].tolist() == [[-10, -11], [0, 0], [0, 0], [-2, -3]]
