"""`forgemq runs`: every run of this machine, and those that only its broker knows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from rich.console import Console
from rich.table import Column, Table

from forgemq_launcher import exit_status
from forgemq_launcher.display.lines import say, show
from forgemq_launcher.records.evaluation import DomainEvaluation
from forgemq_launcher.records.known_runs import runs_there, steps_there
from forgemq_launcher.run_folder import RunFolder, RunFolderError
from forgemq_run_view.report import Report
from forgemq_shell.announced_runs import AnnouncedRun
from forgemq_shell.connection import kafka_connection
from forgemq_telemetry.curves import read_curves

_Read = TypeVar("_Read")


async def list_runs(
    folders: Sequence[RunFolder], environ: Mapping[str, str], console: Console
) -> int:
    """Print every run: what it is and how far it came; the status is 1 if one is unreadable.

    Runs without a folder here are listed if they are on the broker that FORGEMQ_KAFKA names; "?"
    are steps that it does not let this process read, or has not any more.
    """
    shown = Table(
        Column("run", no_wrap=True),  # Typed again in other commands, so it is never cut.
        *(Column(name, no_wrap=True) for name in ("state", "steps")),
        *("success sampled", "success greedy", "seed"),
    )
    unreadable: list[str] = []
    for folder in folders:
        try:
            shown.add_row(folder.run, *_run_cells(folder))
        except (RunFolderError, OSError) as error:
            shown.add_row(folder.run, "unreadable")
            unreadable.append(str(error))
    if environ.get("FORGEMQ_KAFKA"):
        here = {folder.run for folder in folders}
        connection = kafka_connection(environ)
        for each in await runs_there(connection):
            run = each.started.run
            if run not in here:
                steps = await steps_there(connection, run)
                shown.add_row(run, *_announced_cells(each, steps=steps))
    show(console, shown if shown.row_count else "no runs yet: `make demo` makes the first")
    for reason in unreadable:
        say(console, reason)
    return exit_status.FAILED if unreadable else exit_status.OK


def _announced_cells(announced: AnnouncedRun, *, steps: int | None) -> tuple[str, ...]:
    """A run's row, after its name, from its first and last record and the steps that it has."""
    started, ended = announced.started, announced.ended
    results = {each.name: each.value for each in ended.results} if ended else {}
    return (
        ended.reason if ended else "no end yet",
        f"{'?' if steps is None else steps}/{started.configuration.trainer.steps}",
        _pair(results.get("success_start"), results.get("success_end")),
        _pair(results.get("success_start_greedy"), results.get("success_end_greedy")),
        str(started.configuration.seed),
    )


def _run_cells(folder: RunFolder) -> tuple[str, ...]:
    """A run's row, after its name."""
    configuration = folder.configuration()
    is_up = folder.is_up()
    state = "up" if is_up else "stopped"
    if folder.is_evaluation:
        return *_evaluation_cells(folder, state=state), str(configuration.seed)
    # That of a run which goes on says how an earlier start of it ended.
    report = None if is_up else _report_of(folder)
    return (
        report.reason if report else state,
        f"{report.steps if report else _curve_steps(folder)}/{configuration.trainer.steps}",
        _pair(report.success_start, report.success_end) if report else "-",
        _pair(report.success_start_greedy, report.success_end_greedy) if report else "-",
        str(configuration.seed),
    )


def _evaluation_cells(folder: RunFolder, *, state: str) -> tuple[str, str, str, str]:
    """State, steps and success of an evaluation, whose success is pass@1 by domain."""
    path = folder / "pass_at_k.json"
    if not path.is_file():
        return state, "-", "-", "-"
    judged = _decoded(path, tuple[DomainEvaluation, ...])
    rates = [f"{rate.rate:.2f}" for each in judged for rate in each.pass_at_k if rate.k == 1]
    success = ", ".join(rates) or "-"
    is_greedy = any(each.temperature == 0 for each in judged)
    return "judged", "-", *(("-", success) if is_greedy else (success, "-"))


def _curve_steps(folder: RunFolder) -> str:
    """How many steps the run's curves have; "?" without curves.

    All of a run that was stopped; up to two fewer of one that is up or was killed.
    """
    if not (folder / "curves.jsonl").is_file():
        return "?"
    return str(max(read_curves(folder.path), default=-1) + 1)


def _report_of(folder: RunFolder) -> Report | None:
    path = folder / "report.json"
    return _decoded(path, Report) if path.is_file() else None


def _decoded(path: Path, kind: type[_Read]) -> _Read:
    """What the file has.

    Raises:
        RunFolderError: it is not JSON, not UTF-8, or of another build.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except ValueError as error:
        raise RunFolderError(f"{path}: {error}") from error


def _pair(start: float | None, end: float | None) -> str:
    if start is None and end is None:
        return "-"
    return " -> ".join("-" if value is None else f"{value:.2f}" for value in (start, end))
