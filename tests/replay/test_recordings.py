"""Recordings of a real run, committed: the present code must write the same bytes from them.

Three steps of tests/integration/dialogue, recorded by `forgemq replay RUN --to FOLDER`. A failure
here means that a run under way cannot go on with this code. If that is intended, raise the core's
logic version (CONTRIBUTING.md, "Change a core") and see recorded.py.
"""

import msgspec
import pytest

from forgemq_bus.log import Place
from forgemq_contracts.run import RunConfiguration
from forgemq_shell.batch import digest
from forgemq_shell.recorded_log import RecordedLog
from forgemq_shell.recording import read_recording, write_recording
from forgemq_shell.replay import replay_task
from forgemq_shell.replay_command import run_transform_service
from forgemq_shell.service import EXIT_FAILED, EXIT_OK, EXIT_REFUSED, Context
from tests.replay.recorded import FOLDER, TRANSFORMS, WHOLE, rewritten


async def never_runs(_: Context) -> None:
    raise AssertionError("a replay does not start the service")


def replayed(service: str, *arguments: str) -> int:
    return run_transform_service(
        service,
        never_runs,
        transform_of=TRANSFORMS[service],
        arguments=("replay", *arguments),
        environ={},
    )


@pytest.mark.parametrize(
    ("stem", "line"),
    [
        ("merger-0", "merger 0: 70 inputs, 11 ticks, 9 outputs in batches 0 to 24: equal\n"),
        ("reward-1", "reward 1: 36 inputs, 0 ticks, 4 outputs in batches 0 to 11: equal\n"),
        ("scheduler-0", "scheduler 0: 72 inputs, 42 ticks, 21 outputs in batches 0 to 53: equal\n"),
    ],
)
def test_a_recording_replays_to_the_bytes_of_its_run(stem, line, capsys):
    assert replayed(stem.split("-")[0], str(FOLDER / f"{stem}.recording")) == EXIT_OK
    assert capsys.readouterr().out == line


DIGESTS = {
    # By logic version: a core that writes other outputs gets a higher one, and a new line here.
    ("merger-0", 1): "8d27b92536945e74f8b32ebe2f10c19e",
    ("merger-0", 2): "8d27b92536945e74f8b32ebe2f10c19e",
    ("merger-0", 3): "80ae798432751f1faa15dd28d7002510",
    ("merger-0", 4): "80ae798432751f1faa15dd28d7002510",
    ("reward-1", 1): "21df9573e8749edbf8e803ea54998525",
    ("reward-1", 2): "21df9573e8749edbf8e803ea54998525",
    ("reward-1", 3): "21df9573e8749edbf8e803ea54998525",
    ("reward-1", 4): "21df9573e8749edbf8e803ea54998525",
    ("scheduler-0", 1): "871b1e6882df1f18316a73e950a645bd",
    ("scheduler-0", 2): "871b1e6882df1f18316a73e950a645bd",
    ("scheduler-0", 3): "871b1e6882df1f18316a73e950a645bd",
}


@pytest.mark.parametrize("stem", WHOLE)
async def test_the_outputs_of_a_recording_have_the_known_digest(stem):
    """So that rewriting a recording cannot go unnoticed."""
    recording = read_recording(FOLDER / f"{stem}.recording")
    transform = TRANSFORMS[recording.service](recording.configuration, {})
    emits = [
        emit
        async for batch in replay_task(
            RecordedLog(recording),
            Place(f"{recording.service}-journal-v1", recording.partition),
            transform.make_core(recording.partition),
            service=recording.service,
            logic_version=transform.logic_version,
        )
        for emit in batch.emits
    ]
    assert digest(emits) == DIGESTS[stem, transform.logic_version]


def test_a_recording_whose_inputs_were_trimmed_is_refused_by_name(capsys):
    assert replayed("merger", str(FOLDER / "merger-1-trimmed.recording")) == EXIT_REFUSED
    assert capsys.readouterr().out.startswith(
        "merger 1: cannot be replayed: retired-groups-v1/1: record 4 is needed but the oldest one "
        "kept is 6;"
    )


def test_code_that_scores_in_another_way_is_named_by_the_first_field_that_differs(tmp_path, capsys):
    recording = read_recording(FOLDER / "reward-1.recording")
    configuration: RunConfiguration = recording.configuration
    rewards = msgspec.structs.replace(configuration.rewards, baseline="leave_one_out")
    configuration = msgspec.structs.replace(configuration, rewards=rewards)
    path = tmp_path / "other.recording"
    write_recording(msgspec.structs.replace(recording, configuration=configuration), path)
    assert replayed("reward", str(path)) == EXIT_FAILED
    difference, *_ = capsys.readouterr().out.splitlines()
    assert difference == (
        "reward 1: 14 inputs, 0 ticks, 1 outputs in batches 0 to 2: first difference at "
        "scored-groups-v1/1@0 (batch 2) in completions.0.advantage (-0.25 on the log, "
        "-0.3333333333333333 replayed)"
    )


@pytest.mark.parametrize("stem", WHOLE)
async def test_rewriting_a_recording_with_the_same_code_changes_nothing(stem):
    recording = read_recording(FOLDER / f"{stem}.recording")
    assert await rewritten(recording) == recording


def test_a_file_that_is_no_recording_of_the_service_is_refused(tmp_path, capsys):
    text = tmp_path / "notes.txt"
    text.write_text("not a recording")
    assert replayed("merger", str(text)) == EXIT_REFUSED
    assert replayed("merger", str(FOLDER / "reward-1.recording")) == EXIT_REFUSED
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"merger: {text}: cannot be read as a recording: ")
    assert second.endswith("reward-1.recording: a recording of reward, not of merger")


def test_recordings_are_written_into_a_folder_and_a_file_in_its_place_is_refused(tmp_path, capsys):
    (tmp_path / "taken").touch()
    assert replayed("merger", "--to", str(tmp_path / "taken")) == EXIT_REFUSED
    assert capsys.readouterr().err == f"merger: --to: {tmp_path / 'taken'} is no folder\n"
