"""A step's heap keeps freed memory if the budget has room for holes, and maps tensors otherwise.

Runs in a new process, as the setting holds for the whole process.
"""

import subprocess
import sys

import pytest

LIFE = """
import ctypes
from forgemq_trainer.heap import suit_heap

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.malloc.argtypes = library.free.argtypes = [ctypes.c_size_t]
mebibytes = 2**20
is_kept = suit_heap(predicted_bytes=64 * mebibytes, budget_bytes={budget} * mebibytes)
before = resident()
tensors = [library.malloc(8 * mebibytes) for _ in range(8)]
for tensor in tensors:
    ctypes.memset(tensor, 1, 8 * mebibytes)
full = resident() - before
for tensor in tensors[:-1]:
    library.free(tensor)
print(int(is_kept), full // mebibytes, (resident() - before) // mebibytes)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
@pytest.mark.parametrize(("budget", "is_kept"), [(128, True), (127, False)])
def test_freed_memory_is_kept_only_if_the_budget_has_room_for_holes(
    *, budget: int, is_kept: bool
) -> None:
    """Seven of eight tensors are freed; the last lies at the heap's end."""
    program = LIFE.replace("{budget}", str(budget))
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    kept, full, after = (int(word) for word in result.stdout.split())
    assert kept == is_kept
    assert 63 <= full <= 66
    assert 63 <= after <= 66 if is_kept else 7 <= after <= 10
