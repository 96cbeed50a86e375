"""Does a reward for completion time make agents work in parallel, by the clock on the wall?

Trains the shop desk with tools that really take their seconds (`shop_desk.real_time`), once with
the reward for speed and once without, for each of three seeds. Then judges both trained models of
a seed, twice and in turns, and the base model between them on the held-out tasks, without a
trainer: `wall_s_per_episode` has what else the machine does in it, so only times of models that
were judged beside each other compare. Curves of the training episodes go to docs/learning/.

    make load NAME=completion_time JSON=completion_time.json    # six runs and fifteen judgings

A run that was played before is read again. `--case NAME` trains this case and judges nothing.
"""

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from measurement import Measurement, arguments
from played_runs import CURVES, folder_of, graded_episodes, judge, play

from forgemq_contracts.arrays import unpack_ids
from forgemq_episode_files.rows import EpisodeRow

RUN_FILE = "deploy/demo/run.toml"
STEPS = 30
# Few enough that an episode's time is mostly its own, not the wait for 63 others on two cores.
AT_ONCE = 24
SETTINGS = (
    'queues.shop_desk.agent="shop_desk.real_time:play"',
    'queues.shop_desk.speed="shop_desk.real_time:speed"',
    f"episodes.concurrent_max={AT_ONCE}",
)
# Fixed before the first run; without the reward `speed` is measured and weighs nothing.
CASES = {"with_speed": "rewards.beta=1.0", "without_speed": "rewards.beta=0.0"}
SEEDS = (0, 1, 2)
JUDGED = ("with_speed", "without_speed", "base", "without_speed", "with_speed")
"""In this order, so that a machine that gets steadily slower or faster favours none."""
UNITS = {"success_sampled": "share", "parallel_share": "share", "calling_turns": "turns"}


def name_of(case: str, seed: int) -> str:
    """The name of a run of this load test."""
    return f"completion-time-{case.replace('_', '-')}-{seed}"


def train(case: str, seed: int) -> Path:
    """Train a case; returns the run's folder."""
    settings = (f"seed={seed}", f"trainer.steps={STEPS}", "evaluation.greedy=false")
    return play(name_of(case, seed), RUN_FILE, *settings, CASES[case], *SETTINGS)


def judge_case(case: str, seed: int, *, number: int) -> Path:
    """Play each held-out task once with the last weights of a case; returns the run's folder."""
    last = folder_of(name_of(case, seed)) / "checkpoints" / "checkpoints" / f"step-{STEPS - 1:08}"
    model = "deploy/demo/model" if case == "base" else str(last)
    settings = ("rewards.beta=1.0", *SETTINGS)
    run = f"judged-{case.replace('_', '-')}-{seed}-{number}"
    return judge(run, model, RUN_FILE, *settings, domain="shop_desk", samples=1)


def results(rows: Sequence[EpisodeRow]) -> dict[str, float]:
    """What these episodes took and reached."""
    metrics = [{each.name: each.value for each in row.metrics} for row in rows]
    turns = sum(each["calling_turns"] for each in metrics)
    return {
        "wall_s_per_episode": statistics.fmean(each["duration_s"] for each in metrics),
        "completion_s_per_episode": statistics.fmean(
            each.get("alone_s", each["engine_s"]) + each["tool_s"] for each in metrics
        ),
        "engine_s_per_episode": statistics.fmean(each["engine_s"] for each in metrics),
        "tool_s_per_episode": statistics.fmean(each["tool_s"] for each in metrics),
        "calling_turns": turns / len(rows),
        "parallel_share": sum(each["parallel_turns"] for each in metrics) / max(1.0, turns),
        "success_sampled": statistics.fmean((row.outcome or 0.0) >= 0.5 for row in rows),
    }


def curve_of(case: str, seed: int) -> Path:
    """Where the curve of a case is written."""
    return CURVES / f"{name_of(case, seed)}.jsonl"


def write_curve(case: str, seed: int, rows: Sequence[EpisodeRow]) -> None:
    """Write what the training episodes took and reached, by the version of their first token."""
    by_version = defaultdict(list)
    for row in rows:
        if row.purpose == "train" and row.turns:
            by_version[unpack_ids(row.turns[0].versions)[0]].append(row)
    lines = [
        json.dumps({"version": version, "episodes": len(found), **results(found)})
        for version, found in sorted(by_version.items())
    ]
    curve_of(case, seed).write_text("".join(f"{line}\n" for line in lines))


def draw() -> None:
    """Draw the curves of all runs: parallel turns, and success on training tasks."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for (number, case), seed in product(enumerate(CASES), SEEDS):
        points = [json.loads(line) for line in curve_of(case, seed).read_text().splitlines()]
        versions = [point["version"] for point in points]
        label = case if seed == SEEDS[0] else None
        for axes, metric in zip(panels, ("parallel_share", "success_sampled"), strict=True):
            axes.plot(versions, [p[metric] for p in points], color=f"C{number}", label=label)
            axes.set(xlabel="version of the weights", ylabel=metric, ylim=(0, 1))
    panels[0].legend()
    figure.savefig(CURVES / "completion-time.png", dpi=110)
    plt.close(figure)


def add_judged(measurement: Measurement) -> None:
    """Judge all models, and add the rows of each, of each judging, and of their comparison."""
    judged = defaultdict(list)
    for seed, (place, case) in product(SEEDS, enumerate(JUDGED)):
        folder = judge_case(case, seed, number=JUDGED[:place].count(case))
        judged[case].append(graded_episodes(folder))
    found: Mapping[str, dict[str, float]] = {
        case: results([row for rows in parts for row in rows]) for case, parts in judged.items()
    }
    for case, values in found.items():
        for metric, value in values.items():
            measurement.row(case, metric, value, UNITS.get(metric, "s"))
        for rows in judged[case]:
            for metric, value in results(rows).items():
                measurement.row(f"{case}, each", metric, value, UNITS.get(metric, "s"))
    ours, control = found["with_speed"], found["without_speed"]
    for metric in ("wall_s_per_episode", "completion_s_per_episode", "tool_s_per_episode"):
        measurement.row("with over without", metric, ours[metric] / control[metric], "ratio")
    for metric in ("parallel_share", "success_sampled"):
        measurement.row("with minus without", metric, ours[metric] - control[metric], "share")


def main() -> int:
    """Train the cases, judge them, and print the table."""
    options = arguments(__doc__ or "")
    measurement = Measurement(
        name="completion_time",
        question="Does a reward for completion time make agents work in parallel?",
        conditions={
            "run": f"{RUN_FILE} with tools that take their seconds, {STEPS} steps, {AT_ONCE} "
            f"episodes at once, seeds {', '.join(map(str, SEEDS))}"
        },
    )
    for seed, case in product(SEEDS, options.case or CASES):
        write_curve(case, seed, graded_episodes(train(case, seed)))
    if not options.case:
        draw()
        add_judged(measurement)
    return measurement.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
