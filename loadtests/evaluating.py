"""What does evaluation on a schedule cost the training beside it, by the clock on the wall?

Plays a run of the demo with smaller steps and a round of held-out tasks after every fifth of them,
on the real broker and the real engine. Steps that train while a round is played are compared with
the other steps of the same run, so that what else the machine does is in both. Each time between
two steps counts as progress of one step, spread evenly over it: `step_s` is the time over the
progress, in which a round was under way (`beside a round`) or not (`alone`). A step trains
episodes that began up to two steps before it, so a part of what a round costs is in the other.

    make load NAME=evaluating JSON=evaluating.json      # one run

A run that was played before is read again.
"""

import itertools
import json
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from measurement import Measurement, arguments
from played_runs import graded_episodes, play

RUN = "evaluating"
RUN_FILE = "deploy/demo/run.toml"
STEPS, EVERY, HELD_OUT = 26, 5, 16
SETTINGS = (
    f"trainer.steps={STEPS}",
    f"evaluation.every_steps={EVERY}",
    f"evaluation.tasks={HELD_OUT}",
    "queues.0.groups_per_step=4",
    # As stale as in the demo: floor((8 + 4 - 2) / 4) = floor((16 + 4 - 2) / 8) = 2 steps.
    "queues.0.slots=8",
)
BETWEEN = "step-"
"""Rounds on the schedule are named so; those before the first and after the last step are not."""


class Span(NamedTuple):
    """A time on the clock of the machine, in milliseconds."""

    begin: int
    end: int

    def shared(self, other: "Span") -> int:
        """Milliseconds that are in both."""
        return max(0, min(self.end, other.end) - max(self.begin, other.begin))


class Pace(NamedTuple):
    """Time, and the steps that were trained in it."""

    seconds: float
    steps: float

    @property
    def step_s(self) -> float:
        """Seconds a step."""
        return self.seconds / self.steps


def events_of(log: str) -> list[dict[str, Any]]:
    """The events in a log; what a library wrote between them is left out."""
    return [json.loads(line) for line in log.splitlines() if line.startswith("{")]


def steps_of(log: str) -> list[Span]:
    """The times between two steps, by the trainer's log."""
    moments = [event["at_ms"] for event in events_of(log) if event["event"] == "trained"]
    return [Span(*pair) for pair in itertools.pairwise(moments)]


def rounds_of(log: str) -> list[Span]:
    """The rounds on the schedule, by the agents' log."""
    events = events_of(log)
    begun = {each["round"]: each["at_ms"] for each in events if each["event"] == "evaluating"}
    ended = {each["round"]: each["at_ms"] for each in events if each["event"] == "evaluated"}
    return [Span(begun[name], ended[name]) for name in begun if name.startswith(BETWEEN)]


def paces(steps: Sequence[Span], rounds: Sequence[Span]) -> tuple[Pace, Pace]:
    """The pace beside rounds, of which one is played at a time, and the pace alone."""
    lengths = [step.end - step.begin for step in steps]
    shared = [sum(map(step.shared, rounds)) for step in steps]
    progress = sum(both / length for both, length in zip(shared, lengths, strict=True))
    beside = Pace(sum(shared) / 1000, progress)
    return beside, Pace(sum(lengths) / 1000 - beside.seconds, len(steps) - progress)


def main() -> int:
    """Play the run, and print the table."""
    options = arguments(__doc__ or "")
    measurement = Measurement(
        name="evaluating",
        question="What does evaluation on a schedule cost the training beside it?",
        conditions={"run": f"{RUN_FILE} {' '.join(SETTINGS)}"},
    )
    folder = play(RUN, RUN_FILE, *SETTINGS)
    steps = steps_of((folder / "logs" / "trainer.log").read_text())
    rounds = rounds_of((folder / "logs" / "agents.log").read_text())
    beside, alone = paces(steps, rounds)
    for case, pace in (("beside a round", beside), ("alone", alone)):
        measurement.row(case, "seconds", pace.seconds, "s")
        measurement.row(case, "steps", pace.steps, "")
        measurement.row(case, "step_s", pace.step_s, "s")
    rows = graded_episodes(folder)
    played = sum(row.round_name.startswith(BETWEEN) for row in rows)
    trained = sum(row.purpose == "train" for row in rows)
    measurement.row("rounds", "rounds", len(rounds), "")
    measurement.row("rounds", "episodes_over_training", played / trained, "x")
    measurement.row("rounds", "step_s_over_alone", beside.step_s / alone.step_s, "x")
    lost = (beside.seconds - beside.steps * alone.step_s) / len(rounds)
    measurement.row("rounds", "lost_steps_a_round", lost / alone.step_s, "steps")
    return measurement.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
