"""`forgemq runs`: every run of this machine, and those that only its broker knows."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Column, Table

from forgemq_launcher import exit_status
from forgemq_launcher.display.lines import say, say_json, show
from forgemq_launcher.records.evaluation import DomainEvaluation
from forgemq_launcher.run_folder import RunFolder, RunFolderError
from forgemq_run_view.report import Report
from forgemq_shell.announced_runs import AnnouncedRun
from forgemq_telemetry.curves import read_curves

UNREADABLE = "unreadable"

_Read = TypeVar("_Read")


class ListedRun(Struct, frozen=True, kw_only=True):
    """A run as the list shows it; None is not known, not measured, or nothing that it has.

    Attributes:
        state: up, stopped, judged, unreadable, no end yet, or how it ended: completed, interrupted,
            failed.
        steps: Trained ones.
        steps_planned: As its configuration says; None for an evaluation.
        pass_at_1: Of an evaluation, by domain.
        is_greedy: Whether an evaluation took the likeliest token each time.
        detail: Why it cannot be read.
    """

    run: str
    state: str
    is_evaluation: bool = False
    steps: int | None = None
    steps_planned: int | None = None
    success_start: float | None = None
    success_end: float | None = None
    success_start_greedy: float | None = None
    success_end_greedy: float | None = None
    pass_at_1: dict[str, float] = {}
    is_greedy: bool = False
    seed: int | None = None
    detail: str = ""


async def list_runs(
    folders: Sequence[RunFolder],
    environ: Mapping[str, str],
    console: Console,
    *,
    as_lines: bool = False,
) -> int:
    """Print every run: what it is and how far it came; the status is 1 if one is unreadable.

    Runs without a folder here are listed if they are on the broker that FORGEMQ_KAFKA names; "?"
    are steps that it does not let this process read, or has not any more. `as_lines` prints each
    run as a line of JSON.
    """
    listed = [_run_of(folder) for folder in folders]
    if environ.get("FORGEMQ_KAFKA"):
        listed += await _elsewhere(environ, here={folder.run for folder in folders})
    if as_lines:
        for run in listed:
            say_json(console, run)
    else:
        _print_table(listed, console)
    is_unreadable = any(run.state == UNREADABLE for run in listed)
    return exit_status.FAILED if is_unreadable else exit_status.OK


async def _elsewhere(environ: Mapping[str, str], *, here: Collection[str]) -> list[ListedRun]:
    """The runs that the broker has and this machine has no folder of."""
    # Imported here: the list of this machine needs no broker client.
    from forgemq_launcher.records.known_runs import runs_there, steps_there
    from forgemq_shell.connection import kafka_connection

    connection = kafka_connection(environ)
    return [
        _announced(each, steps=await steps_there(connection, each.started.run))
        for each in await runs_there(connection)
        if each.started.run not in here
    ]


def _print_table(listed: Sequence[ListedRun], console: Console) -> None:
    shown = Table(
        Column("run", no_wrap=True),  # Typed again in other commands, so it is never cut.
        *(Column(name, no_wrap=True) for name in ("state", "steps")),
        *("success sampled", "success greedy", "seed"),
    )
    for run in listed:
        shown.add_row(*_cells(run))
    show(console, shown if listed else "no runs yet: `make demo` makes the first")
    for run in listed:
        if run.detail:
            say(console, run.detail)


def _cells(run: ListedRun) -> tuple[str, ...]:
    if run.state == UNREADABLE:
        return run.run, run.state
    if run.is_evaluation:
        success = ", ".join(f"{rate:.2f}" for rate in run.pass_at_1.values()) or "-"
        sides = ("-", success) if run.is_greedy else (success, "-")
        return run.run, run.state, "-", *sides, str(run.seed)
    return (
        run.run,
        run.state,
        f"{'?' if run.steps is None else run.steps}/{run.steps_planned}",
        _pair(run.success_start, run.success_end),
        _pair(run.success_start_greedy, run.success_end_greedy),
        str(run.seed),
    )


def _announced(announced: AnnouncedRun, *, steps: int | None) -> ListedRun:
    """A run as its first and last record say, and the steps that it has."""
    started, ended = announced.started, announced.ended
    results = {each.name: each.value for each in ended.results} if ended else {}
    return ListedRun(
        run=started.run,
        state=ended.reason if ended else "no end yet",
        steps=steps,
        steps_planned=started.configuration.trainer.steps,
        success_start=results.get("success_start"),
        success_end=results.get("success_end"),
        success_start_greedy=results.get("success_start_greedy"),
        success_end_greedy=results.get("success_end_greedy"),
        seed=started.configuration.seed,
    )


def _run_of(folder: RunFolder) -> ListedRun:
    """The run of a folder."""
    try:
        return _evaluation(folder) if folder.is_evaluation else _training(folder)
    except (RunFolderError, OSError) as error:
        return ListedRun(run=folder.run, state=UNREADABLE, detail=str(error))


def _training(folder: RunFolder) -> ListedRun:
    configuration = folder.configuration()
    is_up = folder.is_up()
    # That of a run which goes on says how an earlier start of it ended.
    report = None if is_up else _report_of(folder)
    return ListedRun(
        run=folder.run,
        state=report.reason if report else "up" if is_up else "stopped",
        steps=report.steps if report else _curve_steps(folder),
        steps_planned=configuration.trainer.steps,
        success_start=report.success_start if report else None,
        success_end=report.success_end if report else None,
        success_start_greedy=report.success_start_greedy if report else None,
        success_end_greedy=report.success_end_greedy if report else None,
        seed=configuration.seed,
    )


def _evaluation(folder: RunFolder) -> ListedRun:
    """An evaluation, whose success is pass@1 by domain."""
    seed, state = folder.configuration().seed, "up" if folder.is_up() else "stopped"
    path = folder / "pass_at_k.json"
    if not path.is_file():
        return ListedRun(run=folder.run, state=state, is_evaluation=True, seed=seed)
    judged = _decoded(path, tuple[DomainEvaluation, ...])
    return ListedRun(
        run=folder.run,
        state="judged",
        is_evaluation=True,
        pass_at_1={
            each.domain: rate.rate for each in judged for rate in each.pass_at_k if rate.k == 1
        },
        is_greedy=any(each.temperature == 0 for each in judged),
        seed=seed,
    )


def _curve_steps(folder: RunFolder) -> int | None:
    """How many steps the run's curves have; None without curves.

    All of a run that was stopped; up to two fewer of one that is up or was killed.
    """
    if not (folder / "curves.jsonl").is_file():
        return None
    return max(read_curves(folder.path), default=-1) + 1


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
