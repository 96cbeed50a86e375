"""The memory limit of the sandbox, also against memory that no process has mapped."""

import pytest

from tests.unit.graders.test_sandbox import run


async def test_memory_of_one_process_ends_at_the_limit():
    execution = await run("x = []\nwhile True:\n    x.append(bytearray(2**20))")
    assert (execution.ended, execution.status) == ("exit", 1)
    assert b"MemoryError" in execution.stderr


@pytest.mark.slow
async def test_memory_of_several_processes_together_ends_at_the_limit():
    program = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        break
x = bytearray(60 * 2**20)
time.sleep(1000)
"""
    assert (await run(program)).ended == "memory"


async def test_memory_that_no_process_has_to_map_is_refused():
    program = """
import mmap, os
try:
    os.memfd_create("x")
except OSError as error:
    print(error.strerror)
"""
    assert (await run(program)).stdout == b"Operation not permitted\n"


FILLED_SOCKETS = """
import os, socket, time
for _ in range({forks}):
    os.fork()
kept, total = [], 0
try:
    while True:
        kept += socket.socketpair()
        for one in kept[-2:]:
            try:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**23)
            except OSError:
                pass
            one.setblocking(False)
            try:
                while True:
                    total += one.send(b"x" * 2**16)
            except BlockingIOError:
                pass
except OSError as error:
    print(error.strerror, total, flush=True)
time.sleep({sleep_s})
"""


async def test_what_is_queued_in_sockets_is_less_than_the_memory_limit():
    limits = {"memory_bytes": 2**26, "open_files": 64}
    execution = await run(FILLED_SOCKETS.format(forks=1, sleep_s=0.2), **limits)
    lines = execution.stdout.decode().splitlines()
    assert [line.rpartition(" ")[0] for line in lines] == ["Too many open files"] * 2
    assert sum(int(line.split()[-1]) for line in lines) < 2**26


async def test_sockets_of_several_processes_count_as_memory_although_none_has_them_mapped():
    limits = {"memory_bytes": 2**26, "open_files": 64}
    assert (await run(FILLED_SOCKETS.format(forks=2, sleep_s=10), **limits)).ended == "memory"


async def test_a_shared_mapping_without_a_file_is_refused_since_its_pages_need_not_be_mapped():
    """8 MiB each of which one page stays mapped: 320 MiB at a limit of 64 in the same process."""
    program = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype, word = ctypes.c_void_p, ctypes.c_size_t
libc.mmap.argtypes = (ctypes.c_void_p, word, ctypes.c_int, ctypes.c_int, ctypes.c_int, word)
libc.munmap.argtypes = (ctypes.c_void_p, word)
kept = 0
for _ in range(40):
    at = libc.mmap(None, 2**23, 3, 0x21, -1, 0)
    if at == 2**64 - 1:
        break
    ctypes.memset(at, 1, 2**23)
    libc.munmap(at + 4096, 2**23 - 4096)
    kept += 2**23
print(kept, os.strerror(ctypes.get_errno()), os.path.exists("/dev/zero"))
"""
    execution = await run(program, memory_bytes=2**26)
    assert execution.stdout == b"0 Operation not permitted False\n"


async def test_pipes_cannot_be_made_larger():
    program = """
import fcntl, os
try:
    fcntl.fcntl(os.pipe()[1], fcntl.F_SETPIPE_SZ, 2**20)
except OSError as error:
    print(error.strerror, fcntl.fcntl(0, fcntl.F_GETFD))
"""
    assert (await run(program)).stdout == b"Operation not permitted 0\n"
