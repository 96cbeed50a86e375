"""Does the whole system learn the demo task, on the real broker and the real engine?

Plays the demo once for each of five seeds fixed in advance, one after the other, and keeps every
curve, good or bad. `make load NAME=learning JSON=learning.json`; about nine minutes a seed on two
cores. Curves and the table go to docs/learning/.
"""

import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from measurement import Measurement, arguments

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "learning"
SEEDS = (0, 1, 2, 3, 4)
METRICS = ("success_start", "success_end", "success_start_greedy", "success_end_greedy")


def play(seed: int) -> Path:
    """Run the demo with this seed; returns the run's folder."""
    run = f"learning-seed-{seed}"
    folder = ROOT / "runs" / run
    if not (folder / "report.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        command = ["forgemq", "run", "deploy/demo/run.toml", f"run={run}", f"seed={seed}"]
        command[0] = str(Path(sys.executable).with_name("forgemq"))
        subprocess.run(command, cwd=ROOT, check=True)
    return folder


def draw(folders: dict[int, Path]) -> None:
    """Success on training tasks over the steps, one line a seed."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for seed, folder in folders.items():
        rows = [json.loads(line) for line in (folder / "curves.jsonl").read_text().splitlines()]
        points = [(row["step"], row["success"]) for row in rows if row.get("success") is not None]
        axes.plot(*zip(*points, strict=True), label=f"seed {seed}")
    axes.set(xlabel="optimizer step", ylabel="success, training tasks", ylim=(0, 1))
    axes.legend()
    figure.savefig(DOCS / "success.png", dpi=110)


def main() -> int:
    """Play every seed, keep the curves, print the table."""
    options = arguments(__doc__ or "")
    measurement = Measurement(
        name="learning",
        question="How far does held-out success rise in one run of the demo?",
        conditions={"run": "deploy/demo/run.toml, 40 steps of 48 episodes, 128 held-out tasks"},
    )
    DOCS.mkdir(parents=True, exist_ok=True)
    folders = {seed: play(seed) for seed in SEEDS}
    reports = {}
    for seed, folder in folders.items():
        shutil.copy(folder / "curves.jsonl", DOCS / f"seed-{seed}.jsonl")
        reports[seed] = json.loads((folder / "report.json").read_text())
        for metric in METRICS:
            measurement.row(f"seed {seed}", metric, reports[seed][metric], "share")
        measurement.row(f"seed {seed}", "staleness_max", reports[seed]["staleness_max"], "steps")
        measurement.row(f"seed {seed}", "duration_s", reports[seed]["duration_s"], "s")
    for metric in METRICS:
        values = [report[metric] for report in reports.values()]
        measurement.row("median", metric, statistics.median(values), "share")
    draw(folders)
    return measurement.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
