"""Whole runs as the cases of a load test: each is played once, and read again after that."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forgemq_episode_files.arrow_rows import from_arrow
from forgemq_episode_files.reading import read_rows
from forgemq_episode_files.rows import EpisodeRow
from forgemq_telemetry.curves import read_curves

ROOT = Path(__file__).parents[1]
CURVES = ROOT / "docs" / "learning"


def forgemq(*command: str) -> None:
    """Run the tool; raises CalledProcessError if it fails."""
    tool = str(Path(sys.executable).with_name("forgemq"))
    subprocess.run([tool, *command], cwd=ROOT, check=True)


def folder_of(run: str) -> Path:
    """The folder of a run."""
    return ROOT / "runs" / run


def play(run: str, run_file: str, *overrides: str) -> Path:
    """Play a run to its end unless that was done before; returns its folder."""
    folder = folder_of(run)
    if not (folder / "report.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        forgemq("run", run_file, f"run={run}", *overrides)
    return folder


def play_or_stop(run: str, run_file: str, *overrides: str) -> Path:
    """Play a run to its end, or until `forgemq stop` ends it with a report; returns its folder."""
    try:
        return play(run, run_file, *overrides)
    except subprocess.CalledProcessError:
        folder = folder_of(run)
        if not (folder / "report.json").exists():
            raise
        return folder


def judge(run: str, model: str, run_file: str, *overrides: str, domain: str, samples: int) -> Path:
    """Play held-out tasks of a model, without a trainer, unless that was done before."""
    folder = folder_of(run)
    if not (folder / "pass_at_k.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        which = ("--domain", domain, "--samples", str(samples))
        forgemq("eval", model, run_file, *which, f"run={run}", *overrides)
    return folder


def report_of(folder: Path) -> dict[str, Any]:
    """The report of a run that ended."""
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def curve_of(folder: Path) -> list[tuple[int, float]]:
    """(step, success on training tasks) of each step of a run, by the last line of each."""
    found = {step: values.get("success", math.nan) for step, values in read_curves(folder).items()}
    return [(step, success) for step, success in found.items() if not math.isnan(success)]


def graded_episodes(folder: Path) -> Sequence[EpisodeRow]:
    """Every episode of a run that ended, but for those that are masked."""
    exported = folder / "episodes"
    shutil.rmtree(exported, ignore_errors=True)
    forgemq("export", folder.name, "--to", str(exported))
    files = sorted(exported.glob("*.parquet"))
    rows = [from_arrow(values) for path in files for values in read_rows(path)]
    return [row for row in rows if not row.is_masked]
