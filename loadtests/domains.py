"""Four domains mixed in every step, or one after the other: what does each leave a domain with?

Plays the run of deploy/four_domains for three seeds fixed in advance, in two ways that train the
same number of groups of every domain in the same number of steps: `mixed` has two groups of each
domain in every step, `one_after_another` has stages in which one domain trains alone. All else is
the same, also how stale a token may be. Held-out tasks of every domain are played before the first
step, at the end of each stage, and after the last step. The control, `shuffled`, is `mixed` with
the returns dealt out at random inside each group, which must teach no domain anything. Curves go to
docs/learning/.

    make load NAME=domains JSON=domains.json        # three runs for each of three seeds

A control in which no group of a domain has two different returns any more trains nothing and does
not end by itself: `forgemq stop domains-shuffled-0` ends the one of seed 0 with a report, and its
newest whole round of held-out tasks is its last.

A run that was played before is read again. `--case NAME` plays and shows this case alone, and
`--seed N`, any number of times, these seeds alone.
"""

import itertools
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from measurement import Measurement, parser_of
from played_runs import CURVES, graded_episodes, play_or_stop, report_of

from forgemq_episode_files.rows import EpisodeRow

RUN_FILE = "deploy/four_domains/run.toml"
# Fixed before the first run, so that no seed is chosen by its result.
SEEDS = (0, 1, 2)
CASES = ("mixed", "one_after_another", "shuffled")
COLOURS = {"mixed": "C0", "one_after_another": "C1", "shuffled": "0.6"}
DOMAINS = ("reasoning", "documents", "programs", "bookings")
"""In the order in which they train one after the other, which is that of the run file."""

STEPS = 32
STAGE_STEPS = STEPS // len(DOMAINS)
GROUPS_PER_STEP = 8
HELD_OUT = 48
"""Tasks of each domain in a round."""
WHOLE_ROUND = 0.9
"""A round with a smaller part of its tasks was cut off. The rest may be masked."""
START, END = "start-sampled", "end-sampled"
SOLVED = 0.5
"""The least outcome of an episode that counts as a success, as in a run's report."""

Successes = Mapping[str, Mapping[str, float]]
"""Success on held-out tasks, by round and domain."""


def settings_of(case: str) -> tuple[str, ...]:
    """What a case changes in the run file."""
    shared = (
        f"trainer.steps={STEPS}",
        f"evaluation.every_steps={STAGE_STEPS}",
        f"evaluation.tasks={HELD_OUT}",
    )
    if case == "mixed":
        return shared
    if case == "shuffled":
        return (*shared, "rewards.shuffle_returns=true")
    stages = ", ".join(
        f'{{from_step={number * STAGE_STEPS}, domains=[{{domain="{domain}", share=1.0}}]}}'
        for number, domain in enumerate(DOMAINS)
    )
    # A step has four times as many groups of a domain, so four times the slots leave the bound on
    # staleness as it is, floor((16 + 4 - 2) / 8) = floor((4 + 2 - 2) / 2).
    places = (
        f"queues.{domain}.{name}={number}"
        for domain in DOMAINS
        for name, number in (("slots", 2 * GROUPS_PER_STEP), ("window", GROUPS_PER_STEP // 2))
    )
    return (*shared, f"stages=[{stages}]", *places)


def name_of(case: str, seed: int) -> str:
    """The name of a run, and of its curve."""
    return f"domains-{case.replace('_', '-')}-{seed}"


def successes(rows: Sequence[EpisodeRow]) -> Successes:
    """Success on the held-out tasks of each domain in each round that was played to its end."""
    solved: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.purpose == "eval":
            solved[row.round_name][row.domain].append((row.outcome or 0.0) >= SOLVED)
    return {
        name: {domain: statistics.fmean(by_domain[domain]) for domain in DOMAINS}
        for name, by_domain in solved.items()
        if all(len(by_domain[domain]) >= WHOLE_ROUND * HELD_OUT for domain in DOMAINS)
    }


def step_of(round_name: str) -> int:
    """Steps that were trained when a round began."""
    if round_name in (START, END):
        return 0 if round_name == START else STEPS
    return int(round_name.split("-")[1])


def curve_of(case: str, seed: int) -> Path:
    """Where the curve of a run is written."""
    return CURVES / f"{name_of(case, seed)}.jsonl"


def points_of(case: str, seed: int) -> list[dict[str, float]]:
    """Success on the held-out tasks by step, of the rounds in the curve of a run."""
    return [json.loads(line) for line in curve_of(case, seed).read_text().splitlines()]


def write_curve(case: str, seed: int, rows: Sequence[EpisodeRow]) -> None:
    """Write success on the held-out tasks by step, a line for each whole round."""
    found = successes(rows)
    points = [{"step": step_of(each), **found[each]} for each in sorted(found, key=step_of)]
    curve_of(case, seed).write_text("".join(f"{json.dumps(each)}\n" for each in points))


def draw() -> None:
    """Draw success by step of all curves: a panel for each domain, a colour for a case."""
    figure, panels = plt.subplots(1, len(DOMAINS), figsize=(13, 3.4), layout="constrained")
    runs = [each for each in itertools.product(CASES, SEEDS) if curve_of(*each).exists()]
    for number, (domain, axes) in enumerate(zip(DOMAINS, panels, strict=True)):
        for case, seed in runs:
            points = points_of(case, seed)
            label = case if seed == SEEDS[0] else None
            shares = [each[domain] for each in points]
            steps = [each["step"] for each in points]
            axes.plot(steps, shares, color=COLOURS[case], label=label)
        axes.axvspan(number * STAGE_STEPS, (number + 1) * STAGE_STEPS, color="C1", alpha=0.1)
        axes.set(title=domain, xlabel="optimizer step", ylim=(0, 1))
    panels[0].set_ylabel("success, held-out tasks")
    panels[0].legend()
    figure.savefig(CURVES / "domains.png", dpi=110)
    plt.close(figure)


def add_run(measurement: Measurement, case: str, seed: int) -> None:
    """Play a run, write its curve, and add its rows."""
    folder = play_or_stop(name_of(case, seed), RUN_FILE, f"seed={seed}", *settings_of(case))
    write_curve(case, seed, graded_episodes(folder))
    name, points = f"{case}, seed {seed}", points_of(case, seed)
    for domain in DOMAINS:
        measurement.row(name, f"success_start_{domain}", points[0][domain], "share")
        measurement.row(name, f"success_{domain}", points[-1][domain], "share")
    least = min(points[-1][domain] for domain in DOMAINS)
    measurement.row(name, "success_min", least, "share")
    measurement.row(name, "last_round_after", points[-1]["step"], "steps")
    report = report_of(folder)
    measurement.row(name, "tokens_trained", report["tokens_trained"], "tokens")
    measurement.row(name, "steps", report["steps"], "steps")
    groups = report["groups_retired"].get("trained", 0)
    measurement.row(name, "groups_trained", groups, "groups")
    measurement.row(name, "staleness_max", report["staleness_max"], "steps")
    measurement.row(name, "duration_s", report["duration_s"], "s")


def add_medians(measurement: Measurement, case: str) -> None:
    """Add the median over the seeds of each metric of a case."""
    values = defaultdict(list)
    for name, metric, value, unit in measurement.rows:
        if name.startswith(f"{case}, seed "):
            values[metric, unit].append(value)
    for (metric, unit), each in values.items():
        measurement.row(case, metric, statistics.median(each), unit)


def compare(measurement: Measurement) -> None:
    """Add how far the control is below `mixed` in each domain, if both were played."""
    found = {(case, metric): value for case, metric, value, _ in measurement.rows}
    for metric in (f"success_{domain}" for domain in DOMAINS):
        ours, control = found.get(("mixed", metric)), found.get(("shuffled", metric))
        if ours is not None and control is not None:
            measurement.row("mixed minus shuffled", metric, ours - control, "share")


def main() -> int:
    """Play the cases, write their curves, and print the table."""
    parser = parser_of(__doc__ or "")
    parser.add_argument("--seed", action="append", type=int, help="play only this seed")
    options = parser.parse_args()
    cases = options.case or CASES
    if unknown := set(cases) - set(CASES):
        parser.error(f"--case: must be one of {', '.join(CASES)}, got {', '.join(unknown)}")
    measurement = Measurement(
        name="domains",
        question="What does training four domains together, or one after the other, leave each?",
        conditions={
            "run": f"{RUN_FILE}, {STEPS} steps of {GROUPS_PER_STEP} groups of 8 episodes, "
            f"{HELD_OUT} held-out tasks of each domain, sampled"
        },
    )
    CURVES.mkdir(parents=True, exist_ok=True)
    # The cases take turns, so that a machine that gets slower favours none.
    for seed, case in itertools.product(options.seed or SEEDS, cases):
        add_run(measurement, case, seed)
    for case in cases:
        add_medians(measurement, case)
    compare(measurement)
    draw()
    return measurement.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
