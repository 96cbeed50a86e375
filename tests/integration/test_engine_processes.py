"""The processes of a real engine on a CPU."""

import os
import re
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(700)]

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
