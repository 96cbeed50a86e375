"""What does evaluation on a schedule cost the training beside it, by the clock on the wall?

Plays a short run of the demo with `evaluation.every_steps = 2` (`with`) and with 0 (`without`), on
the real broker and the real engine: without, with, with, without, so that a machine that gets
steadily slower or faster favours neither. Counted is the time from the record of the first step to
that of the last, in which both train the same number of groups, and the rounds between are played
beside them; those before the first and after the last step are played in both.

`wall_over_without` is the mean of the two runs with rounds over that of the two without,
`episodes_over_without` the same of all episodes that were played in that time.

    make load NAME=evaluating JSON=evaluating.json      # four runs

A run that was played before is read again.
"""

import json
import statistics
import sys
from pathlib import Path

from measurement import Measurement, arguments
from played_runs import graded_episodes, play

RUN_FILE = "deploy/demo/run.toml"
STEPS, EVERY, HELD_OUT = 9, 2, 16
ORDER = (("without", 0), ("with", 0), ("with", 1), ("without", 1))
SETTINGS = (
    f"trainer.steps={STEPS}",
    "queues.0.groups_per_step=4",
    # As stale as in the demo: floor((8 + 4 - 2) / 4) = floor((16 + 4 - 2) / 8) = 2 steps.
    "queues.0.slots=8",
    f"evaluation.tasks={HELD_OUT}",
)
START, END = ("start-sampled", "start-greedy"), ("end-sampled", "end-greedy")


def settings_of(case: str) -> tuple[str, ...]:
    """What a case changes in the run file."""
    return (*SETTINGS, f"evaluation.every_steps={EVERY if case == 'with' else 0}")


def training_s(log: str) -> float:
    """Seconds from the first step to the last, by the trainer's log."""
    events = [json.loads(line) for line in log.splitlines()]
    moments = [event["at_ms"] for event in events if event["event"] == "trained"]
    return float(moments[-1] - moments[0]) / 1000


def episodes_between(folder: Path) -> tuple[int, int]:
    """Episodes that train and those of rounds between the steps, as the run's log has them."""
    rows = graded_episodes(folder)
    trained = sum(row.purpose == "train" for row in rows)
    rounds = sum(row.purpose == "eval" and row.round_name not in (*START, *END) for row in rows)
    return trained, rounds


def main() -> int:
    """Play the runs, and print the table."""
    options = arguments(__doc__ or "")
    measurement = Measurement(
        name="evaluating",
        question="What does evaluation on a schedule cost the training beside it?",
        conditions={"run": f"{RUN_FILE} {' '.join(SETTINGS)}"},
    )
    took: dict[str, list[float]] = {"with": [], "without": []}
    played: dict[str, list[int]] = {"with": [], "without": []}
    for case, number in ORDER:
        folder = play(f"evaluating-{case}-{number}", RUN_FILE, *settings_of(case))
        seconds = training_s((folder / "logs" / "trainer.log").read_text())
        trained, rounds = episodes_between(folder)
        took[case].append(seconds)
        played[case].append(trained + rounds)
        measurement.row(f"{case} {number}", "training_s", seconds, "s")
        measurement.row(f"{case} {number}", "episodes_trained", trained, "")
        measurement.row(f"{case} {number}", "episodes_of_rounds", rounds, "")
    for metric, values in (("wall_over_without", took), ("episodes_over_without", played)):
        ratio = statistics.fmean(values["with"]) / statistics.fmean(values["without"])
        measurement.row("with over without", metric, ratio, "x")
    return measurement.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
