"""SGLang's hierarchical cache on a CPU: what its wheel takes from CUDA, in plain PyTorch.

On a CPU the tier that SGLang calls the device lies in the same memory as the tier that it calls the
host. The host tier is still needed: what goes to storage, and comes from there, passes through it.
"""

from collections.abc import Sequence
from typing import Protocol

import torch


class _HostPool(Protocol):
    pin_memory: bool


def prepare(*_: object, **__: object) -> None:
    """Add the missing pieces; a hook that SGLang calls before it makes a hierarchical cache."""
    import sglang.srt.mem_cache.pool_host.base as sizes
    import sglang.srt.mem_cache.pool_host.mha as pool

    # SGLang leaves 10 GiB free, which is little beside a GPU and may be all that is free here.
    sizes.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    # A CPU's stream has nothing to wait for: its work is done when a call returns.
    torch.cpu.Stream.synchronize = _return_at_once  # type: ignore[attr-defined]  # not in torch
    torch.cpu.Stream.query = _is_done  # type: ignore[attr-defined]  # not in torch
    pool.transfer_kv_direct = copy_tokens


def leave_unpinned(result: None, pool: _HostPool, *_: object, **__: object) -> None:
    """Let a host pool pin none of its pages; a hook after SGLang's `HostKVCache.__init__`."""
    del result
    pool.pin_memory = False


def copy_tokens(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy the K/V of tokens from one tier to the other, as sgl_kernel's `transfer_kv_direct`.

    Args:
        src_layers: K and V of one layer or of all, each with a row for every slot.
        dst_layers: The same of the other tier.
        src_indices: Slots to read.
        dst_indices: Slots to write, in the same order.
        page_size: Tokens in a row that lie side by side; PyTorch has no use for it.
    """
    del page_size
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def _return_at_once(stream: object) -> None:
    del stream


def _is_done(stream: object) -> bool:
    del stream
    return True
