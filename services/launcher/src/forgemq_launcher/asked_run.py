"""Which run the arguments of `forgemq` mean: a folder by its id, or a file with overrides."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from forgemq_contracts.read_tasks import ReadTasks
from forgemq_contracts.run import RunConfiguration
from forgemq_launcher.core.configuration import (
    ConfigurationError,
    Document,
    changed,
    configuration,
    document,
    name_of,
    names_budget,
    next_run,
    overridden,
)
from forgemq_launcher.core.task_changes import task_changes
from forgemq_launcher.model_folder import check_draft_folder, check_model_files, check_model_folder
from forgemq_launcher.model_messages import check_messages
from forgemq_launcher.placement import device_of, with_budget
from forgemq_launcher.run_folder import RunFolder, RunFolderError, folder_named, names_taken
from forgemq_launcher.task_files import found_tasks
from forgemq_launcher.user_code import check_user_code


class AskedRun(NamedTuple):
    """The run that the arguments ask for."""

    folder: RunFolder
    configuration: RunConfiguration
    tasks: tuple[ReadTasks, ...]
    """What the files of tasks have."""
    task_changes: tuple[str, ...] = ()
    """What a resume found added to them, as `name: before -> after`."""


def asked_run(
    options: argparse.Namespace, *, runs: Path, environ: Mapping[str, str], agents_python: str
) -> AskedRun:
    """The run that the arguments ask for; its folder is made if it is new.

    Raises:
        ConfigurationError: the run cannot be played with what is on this machine.
        RunFolderError: it cannot be resumed.
    """
    if options.resume:
        folder = folder_named(options.resume, runs=runs)
        folder.check_resumable()
        made = changed(folder.configuration(), options.overrides, folder=Path.cwd())
        source, known = f"run {folder.run}", folder.tasks()
        check_paths(made, source=source, agents_python=agents_python)
        found = found_tasks(
            made, source=source, environ=environ, known=known, agents_python=agents_python
        )
        return AskedRun(folder, made, found.tasks, tuple(task_changes(known, found)))
    made = resolved(options, taken=names_taken(runs))
    check_paths(made, source=str(options.file), agents_python=agents_python)
    found = found_tasks(
        made, source=str(options.file), environ=environ, agents_python=agents_python
    )
    if not names_budget(document(options.file.read_text(), overrides=options.overrides)):
        made = with_budget(made, environ, device=device_of(made, environ))
    folder, made = new_folder(made, runs=runs, is_named=names_run(options.overrides))
    return AskedRun(folder, made, found.tasks)


def new_folder(
    made: RunConfiguration, *, runs: Path, is_named: bool, is_evaluation: bool = False
) -> tuple[RunFolder, RunConfiguration]:
    """The folder of a new run, made; of starts at the same time each gets a number of its own.

    Args:
        made: With an id that was free.
        runs: The folder of all runs.
        is_named: Whether a person chose the id; then it is this one or none.
        is_evaluation: As of `RunFolder.make`.

    Raises:
        RunFolderError: a chosen id is taken.
    """
    folder = RunFolder(runs / made.run)
    try:
        folder.make(made, is_evaluation=is_evaluation)
    except RunFolderError:
        if is_named:
            raise
        name = made.run.rpartition("-")[0]
        made = msgspec.structs.replace(made, run=next_run(name, taken=names_taken(runs)))
        return new_folder(made, runs=runs, is_named=False, is_evaluation=is_evaluation)
    return folder, made


def resolved(
    options: argparse.Namespace, *, taken: Sequence[str], run: str = ""
) -> RunConfiguration:
    """The configuration in the file, overridden and checked.

    Args:
        options: Name the file and the overrides; `run=ID` among them is the run's id.
        taken: Ids that a new run must not get.
        run: The run's id unless an override says it; "" for the file's name and the next number.
    """
    overrides = [f'run="{run}"'] if run else []
    values = document_in(options.file, [*overrides, *options.overrides])
    name = name_of(values, default=options.file.resolve().parent.name)
    is_named = names_run([*overrides, *options.overrides])
    made_id = name if is_named else next_run(name, taken=taken)
    return configured(values, source=str(options.file), run=made_id)


def document_in(path: Path, overrides: Sequence[str]) -> Document:
    """The document in this file, with the overrides put in.

    Raises:
        ConfigurationError: the file cannot be read or is not TOML, or an override names nothing.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: not a TOML file: {error}") from error
    try:
        values = document(text, overrides=())
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    return overridden(values, overrides)


def configured(values: Document, *, source: str, run: str) -> RunConfiguration:
    """The configuration in these values; a refusal names where they are from."""
    try:
        return configuration(values, run=run, folder=Path.cwd())
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}: {error}") from error


def names_run(overrides: Sequence[str]) -> bool:
    """Whether one of the overrides is the run's id."""
    return any(each.partition("=")[0].strip() == "run" for each in overrides)


def check_paths(
    made: RunConfiguration, *, source: str, trains: bool = True, agents_python: str = ""
) -> None:
    """Refuse a model or code that is not on this machine, before it is written down anywhere.

    A model that does not train may be of any family. `agents_python` as of `check_user_code`.
    """
    try:
        check = check_model_folder if trains else check_model_files
        check(Path(made.model.path))
        check_messages(made)
        if made.speculation is not None:
            check_draft_folder(made.speculation, model=Path(made.model.path))
        check_user_code(made, agents_python=agents_python)
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}: {error}") from error
