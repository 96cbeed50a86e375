"""The demo run with everything real: broker, engine, agents, gradients; interrupted and resumed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
RUN_FILE = ROOT / "deploy" / "demo" / "run.toml"
SMALL = ("trainer.steps=2", "evaluation.tasks=4", "run=small")

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1500)]


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    with (folder / "launcher.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "forgemq.launcher", "run", str(RUN_FILE), *arguments],
            cwd=ROOT,
            env={**os.environ, "FORGEMQ_LAUNCHER_RUNS": str(folder / "runs")},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def said(folder: Path, pattern: str, *, process: subprocess.Popen[bytes], within_s: float) -> str:
    """The first line with the pattern; fails with the log when the process ends before."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        text = (folder / "launcher.log").read_text(errors="replace")
        found = re.search(f"^.*{pattern}.*$", text, flags=re.MULTILINE)
        if found:
            return found[0]
        if process.poll() is not None:
            break
        time.sleep(0.5)
    pytest.fail(f"never said {pattern!r}:\n{(folder / 'launcher.log').read_text()[-4000:]}")


def left_behind(folder: Path) -> list[str]:
    """Processes whose command line or environment names the folder."""
    found = []
    for process in psutil.process_iter():
        try:
            named = str(folder) in " ".join(process.cmdline())
            named = named or process.environ().get("FORGEMQ_LAUNCHER_RUNS", "").startswith(
                str(folder)
            )
            if named and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                found.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def test_a_run_interrupted_in_the_middle_leaves_nothing_behind_and_resumes_to_its_report(tmp_path):
    first = start(tmp_path, *SMALL)
    try:
        said(tmp_path, "step 0 trained", process=first, within_s=600)
        assert left_behind(tmp_path)
        first.send_signal(signal.SIGINT)
        assert first.wait(timeout=120) == 130
    finally:
        first.kill()
        first.wait()
    assert left_behind(tmp_path) == []

    second = start(tmp_path, "--resume", "small")
    try:
        status = second.wait(timeout=800)
    finally:
        second.kill()
        second.wait()
    assert status == 0, (tmp_path / "launcher.log").read_text()[-4000:]
    assert left_behind(tmp_path) == []

    report = json.loads((tmp_path / "runs" / "small" / "report.json").read_text())
    assert report["guarantees"] == dict.fromkeys(("G1", "G2", "G3", "G4", "G5"), True)
    assert (report["steps"], report["groups_open"]) == (2, 0)
    assert report["groups_retired"]["trained"] == 12
    assert report["groups_retired"]["evaluated"] == 16
    assert report["staleness_max"] <= report["staleness_bound"] == 2
    assert report["merge_ratio_per_request"] > report["merge_ratio_append"] > 1
    assert 0 < report["logprob_gap_max"] < 1e-3
    for name in ("success_start", "success_end", "success_start_greedy", "success_end_greedy"):
        assert 0 <= report[name] <= 1
    assert (tmp_path / "runs" / "small" / "report.png").stat().st_size > 10_000
