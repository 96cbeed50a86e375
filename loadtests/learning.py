"""Does the whole system learn the demo task, on the real broker and the real engine?

Plays the demo once for each of five seeds fixed in advance, one after the other, and keeps every
curve, good or bad. Then plays three controls whose returns are dealt out at random inside each
group, so they must not learn. Curves go to docs/learning/.

    make load NAME=learning JSON=learning.json      # about six minutes a run on two cores
"""

import shutil
import statistics
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from measurement import Measurement, arguments
from played_runs import CURVES, curve_of, play, report_of

RUN_FILE = "deploy/demo/run.toml"
# Fixed before the first run, so that no seed is chosen by its result.
SEEDS = (0, 1, 2, 3, 4)
SHUFFLED_SEEDS = (0, 1, 2)
METRICS = ("success_start", "success_end", "success_start_greedy", "success_end_greedy")


def draw(folders: dict[str, Path]) -> None:
    """Draw success on training tasks over the steps: one line for each run, controls in grey."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, folder in folders.items():
        color, line = ("0.6", "--") if name.startswith("shuffled") else (None, "-")
        axes.plot(*zip(*curve_of(folder), strict=True), label=name, color=color, linestyle=line)
    axes.set(xlabel="optimizer step", ylabel="success, training tasks", ylim=(0, 1))
    axes.legend()
    figure.savefig(CURVES / "success.png", dpi=110)
    plt.close(figure)


def main() -> int:
    """Play every seed and control, copy their curves, and print the table."""
    options = arguments(__doc__ or "")
    measurement = Measurement(
        name="learning",
        question="How far does held-out success rise in one run of the demo?",
        conditions={"run": f"{RUN_FILE}, 40 steps of 64 episodes, 128 held-out tasks"},
    )
    CURVES.mkdir(parents=True, exist_ok=True)
    folders = {
        f"seed-{seed}": play(f"learning-seed-{seed}", RUN_FILE, f"seed={seed}") for seed in SEEDS
    }
    for seed in SHUFFLED_SEEDS:
        overrides = (f"seed={seed}", "rewards.shuffle_returns=true")
        name = f"shuffled-{seed}"
        folders[name] = play(f"learning-{name}", RUN_FILE, *overrides)
    for name, folder in folders.items():
        shutil.copy(folder / "curves.jsonl", CURVES / f"{name}.jsonl")
        report = report_of(folder)
        for metric in METRICS:
            measurement.row(name, metric, report[metric], "share")
        measurement.row(name, "staleness_max", report["staleness_max"], "steps")
        measurement.row(name, "duration_s", report["duration_s"], "s")
    for metric in METRICS:
        values = [row[2] for row in measurement.rows if row[0][:4] == "seed" and row[1] == metric]
        measurement.row("median of seeds", metric, statistics.median(values), "share")
    draw(folders)
    return measurement.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
