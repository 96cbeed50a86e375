"""The flags of an engine with adapters, and which of them a request runs with."""

from dataclasses import dataclass, field

import pytest
import torch

from forgemq_sglang_cpu.adapters import EngineAdapters, follow, run_with_newest
from forgemq_sglang_cpu.options import EngineOptions, command_line
from forgemq_sglang_cpu.unpinned import leave_unpinned

ADAPTERS = EngineAdapters(rank=8, targets=("q_proj", "v_proj"))


@dataclass
class Adapter:
    lora_name: str


@dataclass
class Scheduler:
    """What an engine has loaded, by id; it is its own worker, runner and manager."""

    lora_refs: dict[str, Adapter]
    flushes: int = 0

    def flush_cache(self) -> bool:
        self.flushes += 1
        return True

    @property
    def tp_worker(self) -> "Scheduler":
        return self

    model_runner = lora_manager = tp_worker


@dataclass
class Request:
    lora_id: str | None
    extra_key: str | None


@dataclass
class Load:
    success: bool
    loaded_adapters: dict[str, str] = field(default_factory=lambda: {"1.4": "/a"})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((None, None), ("new", "new")),
        ((None, "salt"), ("new", "saltnew")),
        (("old", "saltold"), ("new", "saltnew")),
        (("new", "saltnew"), ("new", "saltnew")),
    ],
)
def test_a_request_runs_with_the_adapter_of_the_policy_that_was_loaded_last(
    before: tuple[str | None, str | None], after: tuple[str, str]
) -> None:
    """Its K/V is filed under that adapter alone."""
    names = {"old": "1.3", "new": "1.4", "other": "of-somebody-else"}
    scheduler = Scheduler({key: Adapter(name) for key, name in names.items()})
    request = Request(*before)
    run_with_newest(scheduler, request, set())
    assert (request.lora_id, request.extra_key) == after


def test_without_an_adapter_of_the_policy_a_request_keeps_its_own() -> None:
    request = Request("other", "saltother")
    run_with_newest(Scheduler({"other": Adapter("of-somebody-else")}), request)
    assert (request.lora_id, request.extra_key) == ("other", "saltother")


def test_a_load_drops_the_cache_and_its_answer_says_which_adapter_is_followed() -> None:
    scheduler = Scheduler({})
    for success, name in ((False, "1.4"), (True, "of-somebody-else")):
        answer = follow(Load(success=success), scheduler, Adapter(name))
        assert (answer.loaded_adapters, scheduler.flushes) == ({"1.4": "/a"}, 0)
    answer = follow(Load(success=True), scheduler, Adapter("1.4"))
    assert answer.loaded_adapters == {"1.4": "/a", "followed": "1.4"}
    assert scheduler.flushes == 1


def test_an_engine_has_the_flags_of_adapters_only_if_it_serves_them() -> None:
    def line(options: EngineOptions) -> str:
        return " ".join(command_line(options, model_path="m", host="127.0.0.1", port=7))

    flags = "--enable-lora --max-lora-rank 8 --max-loras-per-batch 2"
    flags += " --lora-target-modules q_proj v_proj"
    assert f"{flags} --lora-backend torch_native" in line(EngineOptions(adapters=ADAPTERS))
    on_gpu = line(EngineOptions(adapters=ADAPTERS, has_gpu=True))
    assert flags in on_gpu
    assert "--lora-backend" not in on_gpu
    assert "--enable-lora" not in line(EngineOptions())


def test_what_sglang_pins_stays_in_plain_memory() -> None:
    def pinning(values: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.tensor(values, dtype=torch.int32, pin_memory=True)
        return made, made.pin_memory()

    made, pinned = leave_unpinned(pinning, [3, 4])  # type: ignore[misc]  # a hook's return is object
    assert made.tolist() == pinned.tolist() == [3, 4]
    assert not pinned.is_pinned()
