"""The control of an environment differs from what it is a control of in one field."""

from pathlib import Path, PurePath

from environment import RUN_FILE, settings_of

from forgemq_contracts.mixture import staleness_bounds
from forgemq_contracts.run import RunConfiguration
from forgemq_contracts.run_changes import changes
from forgemq_launcher.core.configuration import configuration, document

ROOT = Path(__file__).parents[3]


def run_of(*overrides: str) -> RunConfiguration:
    values = document((ROOT / RUN_FILE).read_text(), overrides=overrides)
    return configuration(values, run="r", folder=PurePath("/"))


def test_a_shortened_run_is_as_stale_as_its_file_and_its_control_only_shuffles_returns():
    run, control = (run_of(*settings_of(case, 0)) for case in ("trained", "shuffled"))
    assert staleness_bounds(run) == staleness_bounds(run_of())
    assert [str(change) for change in changes(run, control)] == [
        "rewards.shuffle_returns: False -> True"
    ]
