"""What an engine that was killed leaves is removed, and nothing of other engines."""

import os
import subprocess
import sys
from pathlib import Path

from forgemq_sglang_cpu.left_files import (
    SHARED,
    make_temporary,
    pids_of_group,
    remove_left_files,
    shared_files_of,
)

PROGRAM = """
import mmap, sys
for name in sys.argv[1:]:
    with open(name, "r+b") as file:
        kept = globals()[name] = mmap.mmap(file.fileno(), 0)
print(flush=True)
input()
"""


def test_what_a_group_has_of_sglangs_shared_memory_is_removed_and_nothing_else(
    tmp_path: Path,
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    (temporary / "socket").touch()
    unique = tmp_path.name + str(os.getpid())
    names = [f"sgl_shm_mq_{unique}", f"sglang_loads_{unique}.shm", f"psm_{unique}"]
    others = [SHARED / f"sgl_shm_mq_other_{unique}", SHARED / names[2]]
    files = [SHARED / name for name in names]
    try:
        for file in (*files, *others):
            file.write_bytes(bytes(4096))
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *map(str, files)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        ) as leader:
            assert leader.stdout is not None
            leader.stdout.readline()
            shared = shared_files_of(leader.pid)
            leader.communicate(b"\n")
        assert shared == {*files[:2]}
        remove_left_files(shared, temporary)
        assert [file.exists() for file in (*files, *others)] == [False, False, True, True, True]
        assert not temporary.exists()
        remove_left_files(shared, None)
    finally:
        for file in (*files, *others):
            file.unlink(missing_ok=True)


def test_every_engine_has_a_folder_that_no_other_user_reads() -> None:
    folders = [make_temporary() for _ in range(2)]
    for folder in folders:
        assert folder.stat().st_mode & 0o077 == 0
        remove_left_files((), folder)
    assert folders[0] != folders[1]


def test_a_group_has_its_leader_and_what_that_started() -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, process_group=0
    ) as leader:
        while len(pids := pids_of_group(leader.pid)) < 2:
            assert leader.poll() is None
        assert leader.pid in pids
        assert os.getpid() not in pids
        leader.communicate(b"\n")
    assert pids_of_group(leader.pid) == frozenset()
