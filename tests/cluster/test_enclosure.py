"""What a node leaves behind, which is nothing."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.cgroups import hierarchies, node_group
from tests.cluster.enclosure import ADDRESS, KERNEL, enclosure

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root"),
]

HOLDS = """
import subprocess, sys, time
from pathlib import Path
import psutil
from tests.cluster.enclosure import enclosure
with enclosure(Path(sys.argv[1])) as inside:
    entering = psutil.Process(subprocess.Popen(inside.inside(["sleep", "600"])).pid)
    while not (found := entering.children()):
        time.sleep(0.02)
    print(inside.first_id, found[0].pid, flush=True)
    time.sleep(600)
"""
GONE_WITHIN_S = 10.0


def test_all_that_runs_inside_ends_if_its_maker_is_killed(tmp_path: Path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as maker:
        assert maker.stdout is not None
        first, second = map(int, maker.stdout.readline().split())
        maker.kill()
    assert first != second
    deadline_s = time.monotonic() + GONE_WITHIN_S
    while psutil.pid_exists(first) or psutil.pid_exists(second):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_the_machine_keeps_its_own_kernel_settings_network_and_folders(tmp_path: Path):
    before = {name: Path(f"/proc/sys/{name}").read_text() for name in KERNEL}
    with enclosure(tmp_path) as inside:
        for name, value in KERNEL.items():
            assert inside.run("cat", f"/proc/sys/{name}") == f"{value}\n"
        assert ADDRESS in inside.run("ip", "address")
        assert set(inside.run("ls", "/run").split()) <= {"mount"}
        assert {name: Path(f"/proc/sys/{name}").read_text() for name in KERNEL} == before
        addresses = subprocess.run(["ip", "address"], capture_output=True, text=True, check=True)
        assert ADDRESS not in addresses.stdout
        assert list(Path("/run").iterdir()) != []


def test_a_command_that_fails_inside_says_what_it_printed(tmp_path: Path):
    with enclosure(tmp_path) as inside, pytest.raises(RuntimeError, match="No such file"):
        inside.run("ls", "/there-is-no-such-folder")


def test_a_group_that_a_killed_test_left_is_replaced_and_none_stays():
    name = f"forgemq-test-{os.getpid()}"
    left = [root / name / "kubepods" for root in hierarchies()]
    for each in left:
        each.mkdir(parents=True)
    with node_group(name):
        assert [each.exists() for each in left] == [False] * len(left)
        assert all((root / name).is_dir() for root in hierarchies())
    assert [root for root in hierarchies() if (root / name).exists()] == []
