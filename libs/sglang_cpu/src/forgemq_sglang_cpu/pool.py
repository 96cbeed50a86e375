"""A K/V pool that several engines share: its flags, and under which weights K/V is filed in it.

An engine writes what it has computed to the pool, and another engine reads it there instead of
computing it again. SGLang finds K/V by its tokens and a request's `extra_key`, for which ForgeMQ
sends the version of the weights (`<lineage>.<version>`) that the engine has when it is asked. Some
requests wait in the engine while new weights are loaded, or are retracted and computed again. They
would file K/V of the new weights under the old name, where an engine that still has the old weights
finds it. So the engine itself sets its own name for them, whenever it looks for a request's prefix:
from then on until it is retracted, a request is computed by one version of the weights.
"""

import json
import time
from collections.abc import Mapping
from typing import Literal, Protocol, TypeAlias

from msgspec import Struct

Storage: TypeAlias = Literal["file", "mooncake", "hf3fs"]
Prefetch: TypeAlias = Literal["best_effort", "wait_complete", "timeout"]


_DRAIN_ROUNDS_MAX = 2000
_DRAIN_POLL_S = 0.005
"""Both together: 10 s. Counted, as each process of an engine must look equally often."""


class EnginePool(Struct, frozen=True, kw_only=True):
    """One pool as one engine uses it.

    Attributes:
        storage: SGLang's backend.
        folder: Of the backend `file`.
        folder_gb_max: Above it the engine deletes what was not used for longest; None: no limit.
        extra_config: SGLang's configuration of another backend: a JSON object, or `@` and a file.
        page_tokens: Tokens that are stored, found and fetched together.
        host_gb: Of each process of the engine, for the tier between it and the pool; None: at most
            twice its own cache.
        prefetch: How long a request waits for what the pool has of its context.
    """

    storage: Storage
    folder: str = ""
    folder_gb_max: float | None = None
    extra_config: str = ""
    page_tokens: int = 16
    host_gb: int | None = None
    prefetch: Prefetch = "timeout"


class _Request(Protocol):
    extra_key: str | None


class _TieredCache(Protocol):
    """SGLang's cache with its copies that are under way, by what each of them belongs to."""

    ongoing_prefetch: Mapping[object, object]
    ongoing_write_through: Mapping[object, object]
    ongoing_load_back: Mapping[object, object]
    ongoing_backup: Mapping[object, object]
    enable_storage: bool

    def release_aborted_request(self, request: object) -> None: ...

    def check_hicache_events(self) -> None: ...


class _Scheduler(Protocol):
    enable_hierarchical_cache: bool
    tree_cache: _TieredCache
    _engine_paused: bool


def arguments(pool: EnginePool, *, has_gpu: bool) -> list[str]:
    """The flags of SGLang for an engine with this pool."""
    flags = ["--page-size", str(pool.page_tokens), "--enable-hierarchical-cache"]
    flags += ["--hicache-write-policy", "write_through"]
    flags += ["--hicache-storage-backend", pool.storage]
    flags += ["--hicache-storage-prefetch-policy", pool.prefetch]
    if extra_config := _extra_config(pool):
        flags += ["--hicache-storage-backend-extra-config", extra_config]
    if pool.host_gb is not None:
        flags += ["--hicache-size", str(pool.host_gb)]
    elif not has_gpu:
        # By itself SGLang would want 10 GiB to stay free.
        flags += ["--hicache-ratio", "2"]
    if not has_gpu:
        # What `host_cache` has in plain PyTorch.
        flags += ["--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first"]
    return flags


def file_under_own_weights(
    request: _Request, tree_cache: object | None = None, *_: object, **__: object
) -> None:
    """Name the weights that will compute a request; a hook before SGLang looks for its prefix.

    Args:
        request: SGLang's `Req`.
        tree_cache: None if a prefill goes on that has looked already.
    """
    if not getattr(tree_cache, "enable_storage", False):
        return
    from sglang.srt.runtime_context import get_serving

    request.extra_key = get_serving().weight_version


def drain_copies(scheduler: _Scheduler, *_: object, **__: object) -> None:
    """Let the copies between the tiers of a paused engine end; a hook before it drops its cache.

    SGLang refuses to drop the cache while one is under way, and a paused scheduler never looks
    whether it has ended: new weights would be refused again and again. What waiting requests are
    being fetched belongs to the old weights, and is given up.

    Args:
        scheduler: SGLang's `Scheduler`.
    """
    if not scheduler.enable_hierarchical_cache or not scheduler._engine_paused:
        return
    cache = scheduler.tree_cache
    if cache.enable_storage:
        for request in list(cache.ongoing_prefetch):
            cache.release_aborted_request(request)
    for _round in range(_DRAIN_ROUNDS_MAX):
        if not _copies_under_way(cache):
            return
        cache.check_hicache_events()
        time.sleep(_DRAIN_POLL_S)


def _copies_under_way(cache: _TieredCache) -> bool:
    between_tiers = cache.ongoing_write_through or cache.ongoing_load_back
    if not cache.enable_storage:
        return bool(between_tiers)
    return bool(between_tiers or cache.ongoing_prefetch or cache.ongoing_backup)


def _extra_config(pool: EnginePool) -> str:
    if pool.storage != "file":
        return pool.extra_config
    config: dict[str, object] = {"file_storage_path": pool.folder}
    if pool.folder_gb_max is not None:
        config["max_size"] = round(pool.folder_gb_max * 1e9)
    return json.dumps(config)
