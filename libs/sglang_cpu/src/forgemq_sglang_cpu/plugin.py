"""What SGLang loads through its entry points, in every one of its processes.

Only hooks of SGLang's own registry are used; names below are those of sglang 0.5.23, and a hook on
a name that is gone is logged by SGLang and left out.
"""

import os
from collections.abc import Callable
from datetime import timedelta

WEIGHT_GROUP_TIMEOUT_VARIABLE = "FORGEMQ_ENGINE_WEIGHT_GROUP_TIMEOUT_S"

_PIN_HOST_MEMORY = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"
_JOIN_WEIGHT_GROUP = (
    "sglang.srt.model_executor.model_runner_components.weight_updater.init_custom_process_group"
)


def activate() -> str | None:
    """Name of the platform class on a machine without an accelerator, None elsewhere."""
    import torch

    if torch.accelerator.is_available():
        return None
    return "forgemq_sglang_cpu.platform:CpuPlatform"


def register_hooks() -> None:
    """Register the hooks this machine and environment need; none on a bare GPU server."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if activate() is not None:
        # Host pools always ask for pinned memory; there is no accelerator to pin it for.
        HookRegistry.register(_PIN_HOST_MEMORY, _leave_unpinned, HookType.REPLACE)
    timeout_s = os.environ.get(WEIGHT_GROUP_TIMEOUT_VARIABLE)  # noqa: TID251 (a plugin's only input)
    if timeout_s:
        HookRegistry.register(
            _JOIN_WEIGHT_GROUP, _bounded_join(timedelta(seconds=float(timeout_s))), HookType.AROUND
        )


def _leave_unpinned(buffer: object, registration_granularity_bytes: int | None = None) -> None:
    del buffer, registration_granularity_bytes


def _bounded_join(timeout: timedelta) -> Callable[..., object]:
    # torch waits 30 minutes by default, and the scheduler's loop stands still meanwhile.
    def join(original: Callable[..., object], *args: object, **arguments: object) -> object:
        return original(*args, **{"timeout": timeout, **arguments})

    return join
