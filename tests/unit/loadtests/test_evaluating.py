"""What a round of held-out tasks costs is read from the times of steps and rounds."""

from pathlib import Path, PurePath

import pytest
from evaluating import RUN_FILE, SETTINGS, Pace, Span, paces, rounds_of, steps_of

from forgemq_contracts.mixture import staleness_bounds
from forgemq_contracts.run import RunConfiguration
from forgemq_launcher.core.configuration import configuration, document

ROOT = Path(__file__).parents[3]

TRAINER = """{"at_ms":1000,"event":"started"}
{"at_ms":5000,"event":"trained","step":0}
A warning of a library
{"at_ms":6000,"event":"published"}
{"at_ms":9000,"event":"trained","step":1}
{"at_ms":19000,"event":"trained","step":2}
"""

AGENTS = """{"at_ms":1000,"event":"evaluating","round":"start"}
{"at_ms":4000,"event":"evaluated","round":"start"}
{"at_ms":8000,"event":"evaluating","round":"step-2"}
{"at_ms":14000,"event":"evaluated","round":"step-2"}
"""


def run_of(*overrides: str) -> RunConfiguration:
    values = document((ROOT / RUN_FILE).read_text(), overrides=overrides)
    return configuration(values, run="r", folder=PurePath("/"))


def test_steps_lie_between_records_of_the_trainer_and_rounds_of_the_schedule_are_found():
    assert steps_of(TRAINER) == [Span(5000, 9000), Span(9000, 19000)]
    assert rounds_of(AGENTS) == [Span(8000, 14000)]


def test_the_time_of_a_step_that_is_partly_beside_a_round_is_shared_out():
    beside, alone = paces(steps_of(TRAINER), rounds_of(AGENTS))
    # A second of the first step's four, and five of the second one's ten.
    assert beside == Pace(6.0, 0.75)
    assert alone == Pace(8.0, 1.25)
    assert beside.step_s == 8.0
    assert alone.step_s == pytest.approx(6.4)


def test_the_smaller_steps_are_as_stale_as_those_of_the_demo():
    assert staleness_bounds(run_of(*SETTINGS)) == staleness_bounds(run_of())
