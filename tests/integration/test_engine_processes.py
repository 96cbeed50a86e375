"""The processes of a real engine on a CPU."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from forgemq_settings.ports import free_port
from forgemq_sglang_cpu.left_files import SHARED, pids_of_group
from tests.engine_fixture import ENGINE_MODEL

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(700)]

ENDS_WITHIN_S = 20.0
SHARED_MB_MIN = 300.0
"""Of the 650 MB of objects of SGLang and torch; two that import them by themselves share none."""


@pytest.mark.skipif("FORGEMQ_TEST_ENGINE" in os.environ, reason="somebody else started the engine")
@pytest.mark.usefixtures("engine_url")
def test_what_sglang_imports_is_in_memory_once_for_all_processes_of_an_engine() -> None:
    started = psutil.Process().children(recursive=True)
    for name in ("sglang::scheduler", "sglang::detokenizer"):
        shared = [shared_mb(each) for each in started if each.name() == name]
        assert shared
        assert min(shared) > SHARED_MB_MIN


def shared_mb(process: psutil.Process) -> float:
    """Memory that a process wrote, or its parent before the fork, and that both still share."""
    told = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    found = re.search(r"^Shared_Dirty: +(\d+) kB$", told, re.MULTILINE)
    assert found
    return int(found[1]) / 1e3


@pytest.mark.long
@pytest.mark.parametrize("ends_by", ["stop", "its own death", "its parent's death"])
def test_an_engine_of_two_processes_leaves_no_file_however_it_ends(
    tmp_path: Path, ends_by: str
) -> None:
    before = files_of_engines()
    port = free_port()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(ENGINE_MODEL), str(tmp_path), str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        engine = int(parent.stdout.readline())
        assert len(files_of_engines() - before) > 2
        if ends_by == "its parent's death":
            parent.kill()
        else:
            if ends_by == "its own death":
                os.killpg(engine, signal.SIGKILL)
            parent.communicate("\n")
        deadline_s = time.monotonic() + ENDS_WITHIN_S
        while pids_of_group(engine) and time.monotonic() < deadline_s:
            time.sleep(0.1)
    assert pids_of_group(engine) == frozenset()
    assert files_of_engines() - before == set()


PARENT = """
import sys
from pathlib import Path
from forgemq_sglang_cpu.options import EngineOptions
from forgemq_sglang_cpu.server import EngineServer
options = EngineOptions(tensor_parallel=2)
server = EngineServer(sys.argv[1], Path(sys.argv[2]), port=int(sys.argv[3]), options=options)
with server:
    print(server.pid, flush=True)
    input()
"""


def files_of_engines() -> set[Path]:
    """Temporary files and shared memory of engines that are up, or were."""
    temporary = Path(tempfile.gettempdir()).glob("forgemq-engine-*")
    return {*temporary, *SHARED.glob("sgl*")}
