"""Adapters in an engine whose base model stays: their flags, and which requests run with one.

A version of the policy is an adapter there, named `<lineage>.<version>`, and the one that was
loaded last is the policy. SGLang fixes a request's adapter when the request comes, so that one
which waits or is retracted while a newer adapter is loaded would go on with the old one. Here a
request gets its adapter whenever SGLang is about to schedule it: from then on until it is retracted
it is computed by one version. SGLang's cache finds K/V by a key that ends with the adapter's id, so
K/V of another version is never found.
"""

import re
from typing import Protocol

from msgspec import Struct

FOLLOWED = "followed"
"""In the answer to a load: the name of the adapter with which all requests go on."""

_OF_POLICY = re.compile(r"\d+\.\d+")


class EngineAdapters(Struct, frozen=True, kw_only=True):
    """What adapters an engine can load.

    Attributes:
        rank: The largest.
        targets: Linear layers, by the names that transformers and SGLang give them.
    """

    rank: int
    targets: tuple[str, ...]


class _Adapter(Protocol):
    lora_name: str


class _Adapters(Protocol):
    lora_refs: dict[str, _Adapter]
    """Loaded adapters by id, in the order of their loads."""


class _Runner(Protocol):
    lora_manager: _Adapters


class _Worker(Protocol):
    model_runner: _Runner


class _Scheduler(Protocol):
    tp_worker: _Worker

    def flush_cache(self) -> bool: ...


class _Request(Protocol):
    lora_id: str | None
    extra_key: str | None


class _Load(Protocol):
    success: bool
    loaded_adapters: dict[str, str] | None


def adapter_arguments(adapters: EngineAdapters, *, has_gpu: bool) -> list[str]:
    """The flags of SGLang for an engine that serves adapters, one at a time."""
    flags = ["--enable-lora", "--max-lora-rank", str(adapters.rank)]
    # The newest one and, before the first, none: SGLang counts that as one too.
    flags += ["--max-loras-per-batch", "2", "--lora-target-modules", *adapters.targets]
    return flags if has_gpu else [*flags, "--lora-backend", "torch_native"]


def run_with_newest(scheduler: _Scheduler, request: _Request, *_: object, **__: object) -> None:
    """Give a request the newest adapter; a hook before SGLang looks whether it can run."""
    loaded = scheduler.tp_worker.model_runner.lora_manager.lora_refs
    of_policy = (key for key in reversed(loaded) if _OF_POLICY.fullmatch(loaded[key].lora_name))
    newest = next(of_policy, None)
    if newest is None or newest == request.lora_id:
        return
    key = (request.extra_key or "").removesuffix(request.lora_id or "")
    request.lora_id, request.extra_key = newest, key + newest


def follow(result: _Load, scheduler: _Scheduler, load: _Adapter) -> _Load:
    """Drop K/V of the adapter before, and say that all requests go on with this one.

    A hook after an adapter is loaded; an engine without it does not say so in its answer.
    """
    if result.success and _OF_POLICY.fullmatch(load.lora_name):
        # It refuses while requests wait for a grammar: then what is never found is evicted in time.
        scheduler.flush_cache()
        result.loaded_adapters = {**(result.loaded_adapters or {}), FOLLOWED: load.lora_name}
    return result
