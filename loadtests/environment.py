"""Does an environment of the package verifiers teach the policy, by its own rubric?

Plays the run of deploy/environments for seeds fixed in advance, each with the returns as earned and
with the returns dealt out at random inside each group, which must not teach anything. Real broker,
real engine. Curves go to docs/learning/.

    make load NAME=environment JSON=environment.json

A control whose groups have no two different returns any more trains nothing and does not end by
itself: `forgemq stop environment-shuffled-0` ends it with a report, and the load test goes on.

A run that was played before is read again. `--case NAME` plays and shows this case alone, and
`--seed N`, any number of times, these seeds alone.
"""

import shutil
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from measurement import Measurement, parser_of
from played_runs import CURVES, curve_of, play_or_stop, report_of

RUN_FILE = "deploy/environments/run.toml"
# Fixed before the first run, so that no seed is chosen by its result.
SEEDS = (0, 1)
CASES = ("trained", "shuffled")
STEPS, GROUPS_PER_STEP, HELD_OUT = 8, 4, 16
SETTINGS = (
    f"trainer.steps={STEPS}",
    f"queues.0.groups_per_step={GROUPS_PER_STEP}",
    # As stale as the file's own: floor((8 + 4 - 2) / 4) = floor((16 + 4 - 2) / 8) = 2 steps.
    f"queues.0.slots={2 * GROUPS_PER_STEP}",
    f"evaluation.tasks={HELD_OUT}",
)
METRICS = ("success_start", "success_end", "success_start_greedy", "success_end_greedy")


def settings_of(case: str, seed: int) -> tuple[str, ...]:
    """What a case changes in the run file."""
    shuffles = ("rewards.shuffle_returns=true",) if case == "shuffled" else ()
    return (f"seed={seed}", *SETTINGS, *shuffles)


def name_of(case: str, seed: int) -> str:
    """The name of a run, and of its curve."""
    return f"environment-{case}-{seed}"


def draw(folders: dict[tuple[str, int], Path]) -> None:
    """Draw success on training tasks over the steps: one line for each run, controls in grey."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for (case, seed), folder in folders.items():
        color, line = ("0.6", "--") if case == "shuffled" else (f"C{seed}", "-")
        points = curve_of(folder)
        axes.plot(*zip(*points, strict=True), label=f"{case}, {seed}", color=color, linestyle=line)
    axes.set(xlabel="optimizer step", ylabel="success, training tasks", ylim=(0, 1))
    axes.legend()
    figure.savefig(CURVES / "environment.png", dpi=110)
    plt.close(figure)


def main() -> int:
    """Play every case and seed, copy their curves, and print the table."""
    parser = parser_of(__doc__ or "")
    parser.add_argument("--seed", type=int, choices=SEEDS, action="append")
    options = parser.parse_args()
    cases, seeds = options.case or CASES, options.seed or SEEDS
    if unknown := set(cases) - set(CASES):
        parser.error(f"--case: must be one of {', '.join(CASES)}, got {', '.join(unknown)}")
    measurement = Measurement(
        name="environment",
        question="How far does held-out success rise by the rubric of an environment?",
        conditions={"run": f"{RUN_FILE} {' '.join(SETTINGS)}"},
    )
    folders = {
        (case, seed): play_or_stop(name_of(case, seed), RUN_FILE, *settings_of(case, seed))
        for seed in seeds
        for case in cases
    }
    for (case, seed), folder in folders.items():
        name, report = name_of(case, seed), report_of(folder)
        shutil.copy(folder / "curves.jsonl", CURVES / f"{name}.jsonl")
        measurement.row(f"{case} {seed}", "steps", report["steps"], "")
        for metric in METRICS:
            if report[metric] is not None:  # A run that was stopped has no last round.
                measurement.row(f"{case} {seed}", metric, report[metric], "share")
    draw(folders)
    return measurement.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
