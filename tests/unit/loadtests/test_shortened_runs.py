"""Load tests that shorten a run keep how stale its tokens get, and cases differ in one thing."""

from pathlib import Path, PurePath

import environment
import evaluating
import pytest

from forgemq_contracts.mixture import staleness_bounds
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.run_changes import changes
from forgemq_launcher.core.configuration import configuration, document

ROOT = Path(__file__).parents[3]


def run_of(file: str, *overrides: str) -> RunConfiguration:
    values = document((ROOT / file).read_text(), overrides=overrides)
    return configuration(values, run="r", folder=PurePath("/"))


@pytest.mark.parametrize(
    ("file", "case", "control", "difference"),
    [
        (
            environment.RUN_FILE,
            environment.settings_of("trained", 0),
            environment.settings_of("shuffled", 0),
            "rewards.shuffle_returns: False -> True",
        ),
        (
            evaluating.RUN_FILE,
            evaluating.settings_of("with"),
            evaluating.settings_of("without"),
            "evaluation.every_steps: 2 -> 0",
        ),
    ],
)
def test_a_shortened_run_is_as_stale_as_its_file_and_its_control_differs_in_one_field(
    file, case, control, difference
):
    whole, run, other = run_of(file), run_of(file, *case), run_of(file, *control)
    assert staleness_bounds(run) == staleness_bounds(whole)
    assert [str(change) for change in changes(run, other)] == [difference]


LOG = """{"at_ms":1000,"event":"started"}
{"at_ms":5000,"event":"trained","step":0}
{"at_ms":6000,"event":"published"}
{"at_ms":9500,"event":"trained","step":1}
"""


def test_training_lasts_from_the_first_steps_record_to_the_last_ones():
    assert evaluating.training_s(LOG) == 4.5
