"""Sets the C library's allocator for a step: fast if memory allows, exact otherwise.

A tree's activations are tensors of tens to hundreds of megabytes. A heap that keeps freed memory
gives their pages to the next tensor: no page is faulted in and zeroed twice, which saves 15 to 25 %
of a step on a CPU. But tensors of many sizes leave holes in such a heap: resident memory grows to
1.3 to 1.75 times the bytes that torch holds at once. If every large tensor gets its own mmap
instead, there are no holes: resident memory grows by the predicted bytes, within a few per cent.

So if the predicted peak times HOLES fits the budget, the step keeps freed memory (fast). Otherwise
every large tensor gets its own mmap (exact). Either way the process stays within its fixed part
(interpreter, libraries, parameters, gradients, optimizer) plus the memory budget.
"""

import ctypes
import sys

# Numbers of mallopt's parameters, from glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_MMAP_MAX = -4

_NEVER_TRIM = -1
"""Of M_TRIM_THRESHOLD: no free heap memory goes back to the kernel."""

_MAPPED_BYTES_MIN = 128 * 1024
"""glibc's initial threshold. Setting it also stops glibc from raising it with every large free."""

_MAPS_MAX = 65_536
"""glibc's default number of maps; the kernel allows a process 65,530 of all kinds by default."""

_TRIMMED_BYTES = 128 * 1024
"""glibc's default: free memory beyond this at the heap's end goes back to the kernel."""

HOLES = 2.0
"""Bytes that a heap with holes may need for each byte of tensors; the most measured was 1.75."""


def keep_freed_memory() -> bool:
    """Make this process allocate from one heap that does not shrink; False without glibc."""
    library = _glibc()
    if library is None:
        return False
    return bool(library.mallopt(_M_MMAP_MAX, 0)) and bool(
        library.mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM)
    )


def map_large_tensors() -> bool:
    """Make every large tensor a map that ends with it; False without glibc.

    Memory that the heap kept until here goes back to the kernel.
    """
    library = _glibc()
    if library is None:
        return False
    is_set = all(
        [
            library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES_MIN),
            library.mallopt(_M_MMAP_MAX, _MAPS_MAX),
            library.mallopt(_M_TRIM_THRESHOLD, _TRIMMED_BYTES),
        ]
    )
    library.malloc_trim(0)
    return is_set


def suit_heap(*, predicted_bytes: int, budget_bytes: int) -> bool:
    """Set the allocator for a step; returns True if it keeps freed memory.

    Args:
        predicted_bytes: The most that torch holds at once in the step.
        budget_bytes: By which resident memory may grow.
    """
    if predicted_bytes * HOLES <= budget_bytes:
        return keep_freed_memory()
    map_large_tensors()
    return False


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    is_glibc = hasattr(library, "mallopt") and hasattr(library, "malloc_trim")
    return library if is_glibc else None
