"""The edges' schedules whose points are tried one by one: a case for each place and kind of end.

The number of a schedule is that of the point at which its fault happens; behind the last point
nothing does.
"""

from collections.abc import Callable, Mapping, Sequence

from tests.simulation.storm.claims import Played
from tests.simulation.storm.claims_oracle import PAUSE_S
from tests.simulation.storm.claims_points import run_claims_numbered
from tests.simulation.storm.faults import Fault, NumberedFaults, Point
from tests.simulation.storm.grading import Graded, run_grading_numbered

RunNumbered = Callable[[NumberedFaults], Graded | Played]

KILL = Fault("kill")
NO_ANSWER = Fault("no_answer")
STAND_STILL = Fault("pause", pause_s=PAUSE_S)
"""Longer than a session: what wakes up is a zombie."""

RUNS: Mapping[str, RunNumbered] = {
    "gateway": lambda faults: run_claims_numbered("gateway", faults),
    "takeover": lambda faults: run_claims_numbered("takeover", faults),
    "engine": lambda faults: run_claims_numbered("engine", faults),
    "grader": lambda faults: run_grading_numbered(1, faults),
    "graders": lambda faults: run_grading_numbered(2, faults),
}

FAULTS: Mapping[str, tuple[str, Fault]] = {
    "gateway_killed": ("gateway", KILL),
    "gateway_unanswered": ("gateway", NO_ANSWER),
    "takeover_killed": ("takeover", KILL),
    "takeover_unanswered": ("takeover", NO_ANSWER),
    "takeover_stands_still": ("takeover", STAND_STILL),
    "engine_killed": ("engine", KILL),
    "grader_killed": ("grader", KILL),
    "grader_unanswered": ("grader", NO_ANSWER),
    "graders_killed": ("graders", KILL),
    "graders_unanswered": ("graders", NO_ANSWER),
    "graders_stand_still": ("graders", STAND_STILL),
}
"""By case: the run, and what happens at its points in turn."""


def edge_points(case: str) -> Sequence[Point]:
    """Every point of the case's run without a fault, in order."""
    faults = NumberedFaults()
    RUNS[FAULTS[case][0]](faults)
    return faults.points


def run_edge_point(case: str, number: int) -> Graded | Played:
    """Run the schedule whose fault is at the point of this number.

    Raises:
        Exception: a defect; its note says how to run the schedule again.
    """
    run, fault = FAULTS[case]
    try:
        return RUNS[run](NumberedFaults({number: fault}))
    except Exception as error:
        error.add_note(f"run it again: make storm CASE={case} FIRST={number} SEEDS=1")
        raise
