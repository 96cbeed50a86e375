"""`python -m forgemq_<service> replay`: runs a transform's journal again and compares the outputs.

The journal is that of the run FORGEMQ_RUN, or of a recording in a file; `--to` writes recordings.
One line a task on stdout: what was replayed, and that it is equal or the first difference.
"""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeAlias

from forgemq_bus.blobs import BlobStore
from forgemq_bus.errors import AccessError, LogError
from forgemq_bus.kafka import KafkaLog
from forgemq_bus.log import LogReads, Place
from forgemq_contracts.run import RunConfiguration
from forgemq_settings.environment import SettingsError
from forgemq_settings.hidden_process import hide_process
from forgemq_shell.comparison import Comparison, compare
from forgemq_shell.connection import kafka_connection, run_id
from forgemq_shell.difference import difference_lines
from forgemq_shell.journal import JournalError, OtherLogicError
from forgemq_shell.recorded_log import RecordedLog
from forgemq_shell.recording import (
    RecordingError,
    read_recording,
    record_task,
    write_recording,
)
from forgemq_shell.service import EXIT_FAILED, EXIT_OK, EXIT_REFUSED, Main, run_service
from forgemq_shell.started_run import RunNotStartedError, UnreadableRunError, started_run
from forgemq_shell.task_plan import TaskPlan
from forgemq_shell.transform import Transform
from forgemq_shell.transform_settings import TransformSettings

TransformOf: TypeAlias = Callable[[RunConfiguration, Mapping[str, str]], Transform]
"""Wiring of the service for a run; the environment holds its settings."""

Say: TypeAlias = Callable[[str], None]

START_TIMEOUT_S = 30.0
"""The run is on the log already: this only bounds a broker that is slow or the wrong one."""

_REFUSED = (
    AccessError,
    SettingsError,
    RunNotStartedError,
    UnreadableRunError,
    RecordingError,
    JournalError,
)
"""What the user has to correct, or that cannot be replayed."""

KEEPING = "a run with log.keep_for_replay = true keeps every input"


def run_transform_service(
    name: str,
    main: Main,
    *,
    transform_of: TransformOf,
    arguments: Sequence[str],
    environ: Mapping[str, str],
) -> int:
    """Run the service, or replay its journal if the arguments say so; returns the exit status.

    Of a replay: 0 every byte is the same, 1 one is not, or the log failed, 2 refused: settings, a
    file that is not a recording of this service, or inputs that are not kept.
    """
    options = _parser(name).parse_args(arguments)
    if options.command is None:
        hide_process()
        return run_service(name, main, environ)
    try:
        return asyncio.run(_replay(name, options, transform_of=transform_of, environ=environ))
    except _REFUSED as error:
        return _report_error(name, error, EXIT_REFUSED)
    except (LogError, OSError) as error:  # An OSError: recordings that cannot be written.
        return _report_error(name, error, EXIT_FAILED)


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m forgemq_{name}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    replay = commands.add_parser(
        "replay",
        help="run the journal of FORGEMQ_RUN again, compare with the log, write nothing",
        description="Exit status: 0 every byte is the same, 1 one is not, 2 inputs are not kept.",
    )
    source = replay.add_mutually_exclusive_group()
    source.add_argument(
        "file", nargs="?", type=Path, metavar="FILE", help="a recording; needs no broker"
    )
    source.add_argument("--partition", type=int, help="of the journal; default: all of them")
    replay.add_argument(
        "--to", type=Path, metavar="FOLDER", help="write recordings there instead of replaying"
    )
    return parser


def _report_error(name: str, error: Exception, status: int) -> int:
    sys.stderr.write(f"{name}: {error}\n")
    return status


async def _replay(
    name: str,
    options: argparse.Namespace,
    *,
    transform_of: TransformOf,
    environ: Mapping[str, str],
) -> int:
    if options.file is not None and options.to is not None:
        raise SettingsError("--to: records a run, so it cannot be used with FILE")
    if options.to is not None and options.to.exists() and not options.to.is_dir():
        raise SettingsError(f"--to: {options.to} is no folder")
    if options.file is not None:
        return await _replay_file(name, options.file, transform_of=transform_of, environ=environ)
    async with _open_run(environ) as (log, configuration):
        transform = transform_of(configuration, environ)
        if options.to is not None:
            return await record_transform(
                log,
                transform,
                configuration=configuration,
                partition=options.partition,
                folder=options.to,
            )
        return await replay_transform(
            log, transform, configuration=configuration, partition=options.partition, say=_print
        )


async def _replay_file(
    name: str, file: Path, *, transform_of: TransformOf, environ: Mapping[str, str]
) -> int:
    recording = read_recording(file)
    if recording.service != name:
        raise RecordingError(f"{file}: a recording of {recording.service}, not of {name}")
    return await replay_transform(
        RecordedLog(recording),
        transform_of(recording.configuration, environ),
        configuration=recording.configuration,
        partition=recording.partition,
        say=_print,
    )


@asynccontextmanager
async def _open_run(
    environ: Mapping[str, str],
) -> AsyncIterator[tuple[KafkaLog, RunConfiguration]]:
    """Open the log and read the configuration of the run that the settings name."""
    run, connection = run_id(environ), kafka_connection(environ)
    without_blobs = KafkaLog(connection, run=run)
    try:
        started = await started_run(without_blobs, run, timeout_s=START_TIMEOUT_S)
    finally:
        await without_blobs.close()
    blobs = BlobStore(environ.get("FORGEMQ_BLOBS") or started.blobs, run=run)
    log = KafkaLog(connection, run=run, blobs=blobs)
    try:
        yield log, started.configuration
    finally:
        await log.close()


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _tasks(
    transform: Transform, configuration: RunConfiguration, partition: int | None
) -> Iterator[tuple[TaskPlan, tuple[Place, ...]]]:
    """Plan of each task, or of the one that was asked for, and where the task may write.

    Raises:
        SettingsError: the journal has no such partition.
    """
    count = transform.partitions(configuration)
    if partition is not None and not 0 <= partition < count:
        raise SettingsError(f"--partition {partition}: the journal has partitions 0 to {count - 1}")
    for number in range(count) if partition is None else (partition,):
        plan = transform.plan(number, configuration=configuration, settings=TransformSettings())
        yield plan, transform.output_places(number, configuration=configuration)


async def replay_transform(
    log: LogReads,
    transform: Transform,
    *,
    configuration: RunConfiguration,
    partition: int | None,
    say: Say,
) -> int:
    """Replay one task of a transform, or all of them, and say how each compares.

    Returns:
        The exit status: 0 all equal, 1 a difference, 2 no difference, but a task could not be
        replayed.

    Raises:
        SettingsError: the journal has no such partition.
    """
    statuses = set[int]()
    for plan, outputs in _tasks(transform, configuration, partition):
        number = plan.journal.partition
        try:
            result = await compare(log, plan, transform.make_core(number), outputs=outputs)
        except JournalError as error:
            advice = "" if isinstance(error, OtherLogicError) else f"; {KEEPING}"
            say(f"{plan.service} {number}: cannot be replayed: {error}{advice}")
            statuses.add(EXIT_REFUSED)
            continue
        for line in _lines(plan.service, result):
            say(line)
        statuses.add(EXIT_OK if result.difference is None else EXIT_FAILED)
    return EXIT_FAILED if EXIT_FAILED in statuses else max(statuses)


async def record_transform(
    log: LogReads,
    transform: Transform,
    *,
    configuration: RunConfiguration,
    partition: int | None,
    folder: Path,
) -> int:
    """Write recordings of one task, or of all, to `<folder>/<service>-<partition>.recording`.

    Raises:
        RecordingError: a task has too much for one.
        SettingsError: the journal has no such partition.
    """
    for plan, outputs in _tasks(transform, configuration, partition):
        recording = await record_task(log, plan, configuration=configuration, outputs=outputs)
        number = plan.journal.partition
        path = folder / f"{plan.service}-{number}.recording"
        write_recording(recording, path)
        count = sum(len(part.records) for part in recording.partitions)
        _print(f"{plan.service} {number}: {count} records in {path}")
    return EXIT_OK


def _lines(service: str, result: Comparison) -> Sequence[str]:
    name = f"{service} {result.journal.partition}"
    if not result.batches:
        return (f"{name}: nothing journalled that could be replayed",)
    summary = (
        f"{name}: {result.inputs} inputs, {result.ticks} ticks, {result.outputs} outputs in "
        f"batches {result.batch_first} to {result.batch_last}"
    )
    if result.logic_left_out:
        summary += f" (those before are of logic version {result.logic_left_out} and left out)"
    if result.outputs_trimmed:
        summary += f", {result.outputs_trimmed} of the outputs only by digest (trimmed)"
    if result.difference is None:
        return (f"{summary}: equal",)
    first, *more = difference_lines(result.difference)
    return (f"{summary}: {first}", *(f"  {line}" for line in more))
