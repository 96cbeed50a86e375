"""Commands that start or announce a run: `run`, `eval`, `create`."""

import argparse
import asyncio
import importlib.util
import shlex
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from rich.console import Console

from forgemq_launcher import exit_status
from forgemq_launcher.arguments import PROGRAM
from forgemq_launcher.asked_run import (
    asked_run,
    check_paths,
    configured,
    names_run,
    new_folder,
    resolved,
)
from forgemq_launcher.core.configuration import name_of, next_run
from forgemq_launcher.display.lines import say
from forgemq_launcher.placement import DEVICE, device_of
from forgemq_launcher.run_folder import names_taken
from forgemq_launcher.run_setup import RunSetup
from forgemq_launcher.settings import LauncherSettings
from forgemq_launcher.task_files import found_tasks, unread_here
from forgemq_settings.environment import SettingsError


def start_run(
    options: argparse.Namespace,
    *,
    settings: LauncherSettings,
    environ: Mapping[str, str],
    console: Console,
) -> int:
    """Run one of these commands; returns the exit status."""
    match options.command:
        case "run":
            return _run(options, settings=settings, environ=environ, console=console)
        case "eval":
            return _eval(options, settings=settings, environ=environ, console=console)
        case _:
            return _create(options, environ=environ, console=console)


def _run(
    options: argparse.Namespace,
    *,
    settings: LauncherSettings,
    environ: Mapping[str, str],
    console: Console,
) -> int:
    if settings.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise SettingsError(
            "FORGEMQ_LAUNCHER_TENSORBOARD: install forgemq-telemetry[tensorboard], or leave it off"
        )
    asked = asked_run(
        options, runs=Path(settings.runs), environ=environ, agents_python=settings.agents_python
    )
    folder, made = asked.folder, asked.configuration
    device = device_of(made, environ)
    environ = {**environ, DEVICE: device}
    with folder.locked():
        say(console, f"run {folder.run} in {folder.path}")
        if options.resume:
            say(console, f"it goes on with its own configuration: {options.file} is not read")
        budget = made.trainer.memory_budget_bytes / 1e9
        say(console, f"trainer on {device}, trainer.memory_budget_bytes {budget:.1f} GB")
        setup = RunSetup(
            folder=folder,
            configuration=made,
            settings=settings,
            environ=environ,
            is_resumed=bool(options.resume),
            resume_command=resume_command(sys.argv[0], file=options.file, run=folder.run),
            tasks=asked.tasks,
            task_changes=asked.task_changes,
        )
        return _play(setup, console)


def resume_command(called: str, *, file: Path, run: str) -> str:
    """What continues a run in the folder in which it was started; `called` is how the tool was."""
    program = called if Path(called).name == PROGRAM else PROGRAM
    return shlex.join([program, "run", str(file), "--resume", run])


def _eval(
    options: argparse.Namespace,
    *,
    settings: LauncherSettings,
    environ: Mapping[str, str],
    console: Console,
) -> int:
    from forgemq_launcher.judged_domain import DEFAULT_NAME, judged_document

    runs = Path(settings.runs)
    values, source = judged_document(options)
    name = name_of(values, default=DEFAULT_NAME)
    is_named = names_run(options.overrides)
    run = name if is_named else next_run(f"{name}-eval", taken=names_taken(runs))
    made = configured(values, source=source, run=run)
    check_paths(made, source=source, trains=False, agents_python=settings.agents_python)
    found_tasks(made, source=source, environ=environ, agents_python=settings.agents_python)
    folder, made = new_folder(made, runs=runs, is_named=is_named, is_evaluation=True)
    with folder.locked():
        say(console, f"evaluation {folder.run} in {folder.path}, domain as in {source}")
        setup = RunSetup(
            folder=folder,
            configuration=made,
            settings=settings,
            environ=environ,
            samples=options.samples,
        )
        return _play(setup, console)


def _play(setup: RunSetup, console: Console) -> int:
    from forgemq_launcher.app import RunningRun

    async def play() -> int:
        return await RunningRun(setup, console).play()

    return asyncio.run(play())


def _create(options: argparse.Namespace, *, environ: Mapping[str, str], console: Console) -> int:
    from forgemq_launcher.commands import creation

    run = environ.get("FORGEMQ_RUN", "")
    # A file or a setting that is refused is refused before the broker is asked for anything.
    made = resolved(options, taken=[], run=run)
    source = str(options.file)
    check_paths(made, source=source)
    read = partial(found_tasks, source=source, environ=environ, is_elsewhere=True)
    found = read(made)
    blobs, told = creation.blobs_address(environ), partial(say, console)
    asyncio.run(creation.wait_for_named_broker(environ, say=told))
    if not run and not names_run(options.overrides):
        made = asyncio.run(creation.take_number(made, environ))
    if unread := unread_here(made):
        told(f"task files of {', '.join(unread)}: read by the agents only, at their own start")
    tasks = creation.TasksOfFiles(found, partial(read, made))
    started = asyncio.run(creation.create_run(made, environ, blobs=blobs, tasks=tasks, say=told))
    say(console, creation.next_commands(started, kafka=environ["FORGEMQ_KAFKA"]))
    return exit_status.OK
