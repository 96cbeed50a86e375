"""How much memory a run may take, from the files of a kernel."""

from pathlib import Path

import pytest

from forgemq_settings.memory import available_memory_bytes

GIB = 2**30


def machine(root: Path, *, cgroup: str) -> Path:
    """A machine with 64 GiB free, whose process is in this control group."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: {128 * 2**20} kB\nMemAvailable:   {64 * 2**20} kB\nHugePages_Total:       0\n"
    )
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def group_v2(folder: Path, *, limit: str, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\nactive_file {cached}\ninactive_file {cached}\n")


def test_without_a_limit_the_machines_free_memory_is_available(tmp_path):
    root = machine(tmp_path, cgroup="0::/user.slice\n")
    group_v2(root / "sys/fs/cgroup/user.slice", limit="max", used=3 * GIB)
    assert available_memory_bytes(root=root) == 64 * GIB


def test_a_container_has_what_its_limit_leaves_and_its_file_cache(tmp_path):
    root = machine(tmp_path, cgroup="0::/\n")
    group_v2(root / "sys/fs/cgroup", limit=str(16 * GIB), used=10 * GIB, cached=2 * GIB)
    assert available_memory_bytes(root=root) == 10 * GIB


def test_the_tightest_of_all_groups_above_a_process_holds(tmp_path):
    root = machine(tmp_path, cgroup="0::/pod/container\n")
    group_v2(root / "sys/fs/cgroup/pod", limit=str(4 * GIB), used=GIB)
    group_v2(root / "sys/fs/cgroup/pod/container", limit=str(8 * GIB), used=GIB)
    assert available_memory_bytes(root=root) == 3 * GIB


@pytest.mark.parametrize("shown_at", ["", "docker/abc"])
def test_the_first_version_of_control_groups_limits_too(tmp_path, shown_at):
    """In a container the group is shown at the mount's root, under whatever path the host has."""
    root = machine(tmp_path, cgroup="3:cpu:/docker/abc\n4:memory:/docker/abc\n0::/\n")
    folder = root / "sys/fs/cgroup/memory" / shown_at
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{8 * GIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{6 * GIB}\n")
    (folder / "memory.stat").write_text(f"total_active_file 0\ntotal_inactive_file {GIB}\n")
    assert available_memory_bytes(root=root) == 3 * GIB


def test_a_group_over_its_limit_has_nothing_left(tmp_path):
    root = machine(tmp_path, cgroup="0::/\n")
    group_v2(root / "sys/fs/cgroup", limit=str(GIB), used=2 * GIB)
    assert available_memory_bytes(root=root) == 0


def test_this_machine_says_how_much_there_is():
    assert 0 < available_memory_bytes() < 2**60
