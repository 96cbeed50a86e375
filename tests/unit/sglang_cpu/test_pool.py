"""The flags of an engine with a pool, and what a CPU needs for it."""

import json
from dataclasses import dataclass, field

import pytest
import torch

from forgemq_sglang_cpu.host_cache import copy_tokens
from forgemq_sglang_cpu.options import EngineOptions, command_line
from forgemq_sglang_cpu.pool import EnginePool, arguments, drain_copies

FILE = EnginePool(storage="file", folder="/pool", folder_gb_max=1.5)
STORE = EnginePool(
    storage="mooncake", extra_config="@/store.json", page_tokens=64, host_gb=100, prefetch="timeout"
)


@dataclass
class CacheWithCopies:
    """Copies under way end one by one, each when somebody looks; as of SGLang's cache."""

    enable_storage: bool
    ongoing_prefetch: dict[object, object] = field(default_factory=lambda: {"waiting": 1})
    ongoing_write_through: dict[object, object] = field(default_factory=lambda: {1: 1, 2: 2})
    ongoing_load_back: dict[object, object] = field(default_factory=lambda: {3: 3})
    ongoing_backup: dict[object, object] = field(default_factory=lambda: {4: 4})
    given_up: list[object] = field(default_factory=list)

    def release_aborted_request(self, request: object) -> None:
        self.given_up.append(request)
        del self.ongoing_prefetch[request]

    def check_hicache_events(self) -> None:
        for copies in (self.ongoing_write_through, self.ongoing_load_back, self.ongoing_backup):
            if copies:
                copies.popitem()
                return


@dataclass
class SchedulerWithCache:
    tree_cache: CacheWithCopies
    enable_hierarchical_cache: bool = True
    _engine_paused: bool = True


@pytest.mark.parametrize(("has_storage", "left"), [(True, 0), (False, 1)])
def test_a_paused_engine_ends_its_copies_before_it_drops_its_cache(
    has_storage: bool, left: int
) -> None:
    cache = CacheWithCopies(enable_storage=has_storage)
    drain_copies(SchedulerWithCache(cache), True)
    assert not cache.ongoing_write_through
    assert not cache.ongoing_load_back
    # Without a storage nothing is fetched from one or written to it.
    assert (len(cache.ongoing_prefetch), len(cache.ongoing_backup)) == (left, left)
    assert cache.given_up == (["waiting"] if has_storage else [])


def test_an_engine_that_runs_or_has_no_pool_is_left_alone() -> None:
    cache = CacheWithCopies(enable_storage=True)
    drain_copies(SchedulerWithCache(cache, _engine_paused=False))
    drain_copies(SchedulerWithCache(cache, enable_hierarchical_cache=False))
    assert (len(cache.ongoing_write_through), cache.given_up) == (2, [])


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
