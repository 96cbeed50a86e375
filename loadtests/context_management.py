"""Is a policy that learns what to keep better than a fixed window, where the context is too small?

Trains the archive desk, whose inquiries need about three times the context window: with notes that
the policy takes itself (`trained`), and in a window that keeps the newest page (`fixed_window`:
whatever it learns, a third of the inquiries is all that the newest page can answer). The control
trains the first on returns that are dealt out at random inside each group (`shuffled`). Each has
five seeds. Without any management (`none`) every episode ends at the second page, so no group has
two returns to learn from: the base model is judged instead, with five episodes of each held-out
task, and one greedy one. Curves go to docs/learning/.

    make load NAME=context_management JSON=context_management.json    # 15 runs, two judgings

A run that was played before is read again. `--case NAME` plays this case and compares nothing.
"""

import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from measurement import Measurement, arguments
from played_runs import CURVES, curve_of, graded_episodes, judge, play, report_of

from forgemq_contracts.arrays import unpack_ids
from forgemq_episode_files.rows import EpisodeRow

RUN_FILE = "deploy/archive_desk/run.toml"
MODEL = "deploy/archive_desk/model"
# Fixed before the first run, so that no seed is chosen by its result.
SEEDS = (0, 1, 2, 3, 4)
CASES: Mapping[str, tuple[str, ...]] = {
    "trained": (),
    "fixed_window": ('queues.archive_desk.agent="archive_desk.agent:play_in_window"',),
    "shuffled": ("rewards.shuffle_returns=true",),
}
UNMANAGED_SAMPLES = 5
UNMANAGED = 'queues.archive_desk.agent="archive_desk.agent:play_unmanaged"'
GREEDY = "episodes.sampling.temperature=0.001"
"""A run refuses 0, as greedy tokens do not train. Here a logit that is lower by 0.02 has a chance
of 2e-9 beside the highest."""
SUCCESS = {
    "success_sampled_start": "success_start",
    "success_sampled": "success_end",
    "success_greedy_start": "success_start_greedy",
    "success_greedy": "success_end_greedy",
}
"""Metrics on held-out tasks, and the fields of a run's report that have them."""
COLOURS = {"trained": "C0", "fixed_window": "C1", "shuffled": "0.6"}


def folders_of(case: str) -> list[Path]:
    """Play the runs of a case, one for each seed; returns their folders."""
    name = f"contexts-{case.replace('_', '-')}"
    return [play(f"{name}-{seed}", RUN_FILE, f"seed={seed}", *CASES[case]) for seed in SEEDS]


def tokens_of(row: EpisodeRow) -> int:
    """Tokens that the engine reads or samples for an episode, those of a shared prefix once."""
    return sum(len(unpack_ids(turn.context_ids + turn.output_ids)) for turn in row.turns)


def held_out(rows: Sequence[EpisodeRow], *, rounds: Sequence[str]) -> list[EpisodeRow]:
    """The held-out episodes of these rounds."""
    return [row for row in rows if row.round_name in rounds]


def solved(rows: Sequence[EpisodeRow]) -> float:
    """The share of these episodes that count as solved."""
    return statistics.fmean((row.outcome or 0.0) >= 0.5 for row in rows)


def add_case(measurement: Measurement, case: str, folders: Sequence[Path]) -> None:
    """Add the rows of each seed of a case, and their median."""
    by_metric: dict[str, list[float]] = {}
    for seed, folder in zip(SEEDS, folders, strict=True):
        report = report_of(folder)
        ended = held_out(graded_episodes(folder), rounds=["end-sampled"])
        values = {metric: float(report[name]) for metric, name in SUCCESS.items()} | {
            "tokens_per_episode": statistics.fmean(map(tokens_of, ended)),
            "turns_per_episode": statistics.fmean(len(row.turns) for row in ended),
        }
        for metric, value in values.items():
            measurement.row(f"{case}, seed {seed}", metric, value, unit_of(metric))
            by_metric.setdefault(metric, []).append(value)
    for metric, found in by_metric.items():
        measurement.row(case, metric, statistics.median(found), unit_of(metric))


def unit_of(metric: str) -> str:
    """The unit of a metric."""
    return "share" if metric.startswith("success") else metric.partition("_")[0]


def unmanaged(run: str, *settings: str, samples: int) -> list[EpisodeRow]:
    """Judge the base model without any management; returns its episodes."""
    overrides = (UNMANAGED, *settings)
    folder = judge(run, MODEL, RUN_FILE, *overrides, domain="archive_desk", samples=samples)
    return list(graded_episodes(folder))


def add_unmanaged(measurement: Measurement) -> None:
    """Add the rows of the base model without any management."""
    rows = unmanaged("contexts-none", samples=UNMANAGED_SAMPLES)
    greedy = unmanaged("contexts-none-greedy", GREEDY, samples=1)
    measurement.row("none", "success_sampled", solved(rows), "share")
    measurement.row("none", "success_greedy", solved(greedy), "share")
    measurement.row("none", "tokens_per_episode", statistics.fmean(map(tokens_of, rows)), "tokens")


def draw(folders: Mapping[str, Sequence[Path]]) -> None:
    """Draw success on training tasks over the steps: one line for each run."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for case, runs in folders.items():
        for number, folder in enumerate(runs):
            label = None if number else case
            axes.plot(*zip(*curve_of(folder), strict=True), color=COLOURS[case], label=label)
    axes.set(xlabel="optimizer step", ylabel="success, training tasks", ylim=(0, 1))
    axes.legend()
    figure.savefig(CURVES / "context-management.png", dpi=110)
    plt.close(figure)


def compare(measurement: Measurement) -> None:
    """Add how far the medians of the cases are apart, sampled, on held-out tasks."""
    found = {(case, metric): value for case, metric, value, _ in measurement.rows}
    ours = found["trained", "success_sampled"]
    for other in ("fixed_window", "shuffled", "none"):
        gained = ours - found[other, "success_sampled"]
        measurement.row(f"trained minus {other}", "success_sampled", gained, "share")


def main() -> int:
    """Play the cases, copy their curves, and print the table."""
    options = arguments(__doc__ or "")
    measurement = Measurement(
        name="context_management",
        question="Is management that is trained better than a fixed window?",
        conditions={"run": f"{RUN_FILE}, 48 held-out tasks, seeds {SEEDS[0]} to {SEEDS[-1]}"},
    )
    folders = {case: folders_of(case) for case in options.case or CASES}
    for case, runs in folders.items():
        add_case(measurement, case, runs)
        for folder in runs:
            copy = CURVES / f"{folder.name.replace('contexts', 'context-management')}.jsonl"
            shutil.copy(folder / "curves.jsonl", copy)
    if not options.case:
        add_unmanaged(measurement)
        draw(folders)
        compare(measurement)
    return measurement.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
