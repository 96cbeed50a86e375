"""The hooks that SGLang loads through its entry points in each of its processes.

They use SGLang's hook registry. The names below are those of sglang 0.5.23; SGLang logs and skips
a hook on a name that does not exist.
"""

import os
from collections.abc import Callable
from datetime import timedelta

WEIGHT_GROUP_TIMEOUT_VARIABLE = "FORGEMQ_ENGINE_WEIGHT_GROUP_TIMEOUT_S"
FP8_BLOCKS_VARIABLE = "FORGEMQ_ENGINE_FP8_BLOCKS"
"""Set for an engine whose weights are 8-bit floats in blocks."""

_LAUNCHES = (
    "sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes",
    "sglang.srt.entrypoints.engine.Engine._launch_detokenizer_subprocesses",
)
_PIN_HOST_MEMORY = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"
_MAKE_HOST_POOL = "sglang.srt.mem_cache.pool_host.base.HostKVCache.__init__"
_MAKE_HOST_CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.init_hicache"
_LOOK_FOR_PREFIX = "sglang.srt.managers.schedule_batch.Req.init_next_round_input"
_DROP_CACHE = "sglang.srt.managers.scheduler.Scheduler.flush_cache"
_PREPARE_KV_COPY = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup"
_BUILD_PAGE_HASHES = "sglang.srt.mem_cache.cpp_utils.native_hash._load_native_hash_module"
_MAKE_PREFILL_QUEUE = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.__init__"
_PAUSE = "sglang.srt.managers.scheduler.Scheduler.pause_generation"
_NAME_WEIGHTS = "sglang.srt.managers.scheduler.Scheduler.record_weight_version_change"
_CHECK_FINISH = "sglang.srt.managers.schedule_batch.Req.update_finish_state"
_CHOOSE_FP8_LINEAR = "sglang.srt.layers.quantization.fp8.dispatch_w8a8_block_fp8_linear"
_FP8_DTYPES = "sglang.srt.layers.quantization.fp8.Fp8Config.get_supported_act_dtypes"
_CAN_SCHEDULE = "sglang.srt.managers.scheduler.Scheduler.can_schedule_lora_req"
_LOAD_ADAPTER = "sglang.srt.managers.scheduler.Scheduler.load_lora_adapter"
_MAKE_ADAPTERS = "sglang.srt.lora.lora_manager.LoRAManager.__init__"
_PREPARE_ADAPTERS = "sglang.srt.lora.lora_manager.LoRAManager.prepare_lora_batch"
_JOIN_WEIGHT_GROUP = (
    "sglang.srt.model_executor.model_runner_components.weight_updater.init_custom_process_group"
)
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_UPDATE_STEPS = (
    "init_weights_update_group",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_disk",
)
_MAKE_SLEEPER = "sglang.srt.managers.scheduler.Scheduler.init_idle_sleeper"
_RUN_EXPERTS = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"
_PREPARE_GROUPS = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.prepare_mlp_sync_batch"
_FIT_SIZES = "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp"
_COPY_ROWS = "sglang.srt.layers.dp_attention.memcpy"
_PROCESSES = "sglang.srt.distributed.parallel_state.GroupCoordinator"
_PADDED_LENGTH = (
    "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    ".get_cuda_graph_seq_len_fill_value"
)


def activate() -> str | None:
    """Name of the platform class; None on a machine with an accelerator."""
    import torch

    if torch.accelerator.is_available():
        return None
    return "forgemq_sglang_cpu.platform:CpuPlatform"


def register_hooks() -> None:
    """Register the hooks that this machine and environment need."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from forgemq_sglang_cpu import (
        adapters,
        forked,
        fp8_linear,
        host_cache,
        page_hashes,
        pair,
        pool,
        repetition,
        spread,
        unpinned,
    )

    if activate() is not None:
        for launch in _LAUNCHES:
            HookRegistry.register(launch, forked.launch, HookType.AROUND)
        # SGLang's host pools always pin their memory, which fails without an accelerator.
        HookRegistry.register(_PIN_HOST_MEMORY, _leave_unpinned, HookType.REPLACE)
        HookRegistry.register(_MAKE_HOST_POOL, host_cache.leave_unpinned, HookType.AFTER)
        HookRegistry.register(_MAKE_HOST_CACHE, host_cache.prepare, HookType.BEFORE)
        # A Triton kernel that moves K/V between the branches of a tree; a chain has none.
        HookRegistry.register(_PREPARE_KV_COPY, _leave_unprepared, HookType.REPLACE)
        for pinning in (_MAKE_ADAPTERS, _PREPARE_ADAPTERS, _PREPARE_GROUPS):
            HookRegistry.register(pinning, unpinned.leave_unpinned, HookType.AROUND)
        HookRegistry.register(_RUN_EXPERTS, spread.run_present_experts, HookType.AROUND)
        for name, own in {
            _FIT_SIZES: spread.keep_sizes,
            _COPY_ROWS: spread.copy_rows,
            _PADDED_LENGTH: spread.padded_length,
            f"{_PROCESSES}.all_gather_into_tensor": spread.gather_tensors,
            f"{_PROCESSES}.reduce_scatter_tensor": spread.scatter_sums,
            f"{_PROCESSES}.reduce_scatterv": spread.scatter_unequal_sums,
        }.items():
            HookRegistry.register(name, own, HookType.REPLACE)
        HookRegistry.register(_MAKE_PREFILL_QUEUE, pair.number_pages_unpinned, HookType.AFTER)
        if os.environ.get(FP8_BLOCKS_VARIABLE):  # noqa: TID251 (a plugin's only input)
            HookRegistry.register(_CHOOSE_FP8_LINEAR, fp8_linear.choose, HookType.REPLACE)
            HookRegistry.register(_FP8_DTYPES, fp8_linear.with_float32, HookType.AFTER)
    for step in _UPDATE_STEPS:
        HookRegistry.register(f"{_UPDATER}.{step}", spread.report_every_process, HookType.AROUND)
    HookRegistry.register(_MAKE_SLEEPER, spread.wake_often, HookType.AFTER)
    HookRegistry.register(_CAN_SCHEDULE, adapters.run_with_newest, HookType.BEFORE)
    HookRegistry.register(_LOAD_ADAPTER, adapters.follow, HookType.AFTER)
    HookRegistry.register(_PAUSE, pair.take_what_has_come, HookType.BEFORE)
    HookRegistry.register(_NAME_WEIGHTS, pair.note_versions_of_held, HookType.BEFORE)
    HookRegistry.register(_LOOK_FOR_PREFIX, pool.file_under_own_weights, HookType.BEFORE)
    HookRegistry.register(_CHECK_FINISH, repetition.end_repetition, HookType.AFTER)
    HookRegistry.register(_DROP_CACHE, pool.drain_copies, HookType.BEFORE)
    HookRegistry.register(_BUILD_PAGE_HASHES, page_hashes.module_with_get_hash, HookType.REPLACE)
    timeout_s = os.environ.get(WEIGHT_GROUP_TIMEOUT_VARIABLE)  # noqa: TID251 (a plugin's only input)
    if timeout_s:
        HookRegistry.register(
            _JOIN_WEIGHT_GROUP, _bounded_join(timedelta(seconds=float(timeout_s))), HookType.AROUND
        )


def _leave_unpinned(buffer: object, registration_granularity_bytes: int | None = None) -> None:
    del buffer, registration_granularity_bytes


def _leave_unprepared(pool: object) -> None:
    del pool


def _bounded_join(timeout: timedelta) -> Callable[..., object]:
    # torch waits 30 minutes by default, and SGLang's scheduler is blocked meanwhile.
    def join(original: Callable[..., object], *args: object, **arguments: object) -> object:
        return original(*args, **{"timeout": timeout, **arguments})

    return join
