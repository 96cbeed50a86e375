"""Ids of runs and the folders that have their names."""

import io

import pytest
from rich.console import Console

from forgemq_launcher.asked_run import new_folder
from forgemq_launcher.core.configuration import next_run
from forgemq_launcher.dispatch import run_tool
from forgemq_launcher.run_folder import RunFolder, RunFolderError, names_taken


def tool(run_folder: RunFolder, *arguments: str) -> tuple[int, str]:
    """Run a command on this folder's runs; returns its status and what it printed."""
    console = Console(file=io.StringIO(), width=200)
    environ = {"FORGEMQ_LAUNCHER_RUNS": str(run_folder.path.parent)}
    return run_tool(arguments, environ=environ, console=console), console.file.getvalue()


def test_a_new_run_gets_a_name_that_nothing_in_the_folder_of_runs_has(tmp_path):
    (tmp_path / "desk-7").mkdir()
    assert next_run("desk", taken=names_taken(tmp_path)) == "desk-8"
    assert names_taken(tmp_path / "absent") == ()


def test_of_two_starts_with_one_name_the_second_is_refused(run_folder):
    with pytest.raises(RunFolderError, match="desk-1 exists: choose another run id"):
        new_folder(run_folder.configuration(), runs=run_folder.path.parent, is_named=True)


@pytest.mark.parametrize("is_evaluation", [False, True])
def test_of_starts_that_found_the_same_number_free_each_gets_its_own(run_folder, is_evaluation):
    made, runs = run_folder.configuration(), run_folder.path.parent
    for expected in ("desk-2", "desk-3"):
        folder, own = new_folder(made, runs=runs, is_named=False, is_evaluation=is_evaluation)
        assert (folder.run, own.run, folder.configuration().run) == (expected,) * 3
        assert folder.is_evaluation == is_evaluation


@pytest.mark.parametrize("command", [("run", "run.toml", "--resume", "base"), ("inspect", "base")])
def test_a_folder_with_another_name_than_its_run_is_refused_by_both(run_folder, command):
    renamed = run_folder.path.rename(run_folder.path.parent / "base")
    said = f"forgemq: {renamed} is the folder of run desk-1: give it that name again\n"
    assert tool(run_folder, *command) == (2, said)


def test_a_run_that_ended_before_it_had_a_broker_is_named_with_what_to_do(run_folder):
    (run_folder / "kafka" / "ports.json").unlink()
    status, printed = tool(run_folder, "inspect", "desk-1")
    assert status == 2
    assert "run desk-1 has no broker of its own: set FORGEMQ_KAFKA" in printed
    assert "forgemq run FILE --resume desk-1 plays it" in printed
