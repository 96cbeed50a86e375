"""Tells the C library's allocator to keep the memory that a step frees for the next one.

A tree's activations are tensors of tens to hundreds of megabytes. By default glibc maps each of
them from the kernel and gives it back when freed, so every step pays for faulting in, and zeroing,
all its pages again: 15 to 20 % of a step on a CPU. Per-request training, whose tensors are small,
never pays it.
"""

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_NEVER_TRIM = -1


def keep_freed_memory() -> bool:
    """From now on this process allocates from one heap that does not shrink; False if not glibc.

    For a process of its own on a CPU: its resident size stays at the peak of its largest step.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM))
