"""`python -m forgemq.<service> replay`: a transform service's own journal, run again and compared.

One line a task on stdout: what was replayed, and that it is equal or where it first is not.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from forgemq_bus.blobs import BlobStore
from forgemq_bus.errors import AccessError, LogError
from forgemq_bus.kafka import KafkaLog
from forgemq_bus.log import Log
from forgemq_contracts.run import RunConfiguration
from forgemq_settings.environment import SettingsError
from forgemq_shell.comparison import Comparison, compare
from forgemq_shell.connection import kafka_connection, run_id
from forgemq_shell.difference import difference_lines
from forgemq_shell.history import HistoryError
from forgemq_shell.service import EXIT_FAILED, EXIT_OK, EXIT_REFUSED, Main, run_service
from forgemq_shell.started_run import RunNotStartedError, started_run
from forgemq_shell.transform import Transform
from forgemq_shell.transform_settings import TransformSettings

TransformOf: TypeAlias = Callable[[RunConfiguration, Mapping[str, str]], Transform]
"""Wiring of the service for a run; the environment holds its settings."""

Say: TypeAlias = Callable[[str], None]

START_TIMEOUT_S = 30.0
KEEPING = "a run with log.keep_for_replay = true keeps every input"


def run_transform_service(
    name: str,
    main: Main,
    *,
    transform_of: TransformOf,
    arguments: Sequence[str],
    environ: Mapping[str, str],
) -> int:
    """Run the service, or replay what it did where the arguments say so; returns the exit status.

    Of a replay: 0 every byte is the same, 1 one is not, or the log failed, 2 refused: settings, or
    inputs that are not kept.
    """
    options = _parser(name).parse_args(arguments)
    if options.command is None:
        return run_service(name, main, environ)
    try:
        return asyncio.run(_replayed(transform_of, environ, options.partition))
    except (AccessError, SettingsError, RunNotStartedError) as error:
        return _told(name, error, EXIT_REFUSED)
    except LogError as error:
        return _told(name, error, EXIT_FAILED)


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m forgemq_{name}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    replay = commands.add_parser(
        "replay",
        help="run the journal of FORGEMQ_RUN again, compare with the log, write nothing",
        description="Exit status: 0 every byte is the same, 1 one is not, 2 inputs are not kept.",
    )
    replay.add_argument("--partition", type=int, help="of the journal; default: all of them")
    return parser


def _told(name: str, error: Exception, status: int) -> int:
    sys.stderr.write(f"{name}: {error}\n")
    return status


async def _replayed(
    transform_of: TransformOf, environ: Mapping[str, str], partition: int | None
) -> int:
    run, connection = run_id(environ), kafka_connection(environ)
    plain = KafkaLog(connection, run=run)
    try:
        started = await started_run(plain, run, timeout_s=START_TIMEOUT_S)
    finally:
        await plain.close()
    log = KafkaLog(
        connection, run=run, blobs=BlobStore(environ.get("FORGEMQ_BLOBS") or started.blobs, run=run)
    )
    transform = transform_of(started.configuration, environ)
    try:
        return await replay_transform(
            log, transform, configuration=started.configuration, partition=partition, say=_print
        )
    finally:
        await log.close()


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def replay_transform(
    log: Log,
    transform: Transform,
    *,
    configuration: RunConfiguration,
    partition: int | None,
    say: Say,
) -> int:
    """Replay one task of a transform, or all of them, and say how each compares.

    Returns:
        The exit status: 0 all equal, 1 a difference, 2 none, but some could not be replayed.

    Raises:
        SettingsError: the journal has no such partition.
    """
    count = transform.partitions(configuration)
    if partition is not None and not 0 <= partition < count:
        raise SettingsError(f"--partition {partition}: the journal has partitions 0 to {count - 1}")
    statuses = set[int]()
    for number in range(count) if partition is None else (partition,):
        plan = transform.plan(number, configuration=configuration, settings=TransformSettings())
        outputs = transform.output_places(number, configuration=configuration)
        try:
            result = await compare(log, plan, transform.core(number), outputs=outputs)
        except HistoryError as error:
            say(f"{plan.service} {number}: cannot be replayed: {error}; {KEEPING}")
            statuses.add(EXIT_REFUSED)
            continue
        for line in _lines(plan.service, result):
            say(line)
        statuses.add(EXIT_OK if result.difference is None else EXIT_FAILED)
    return EXIT_FAILED if EXIT_FAILED in statuses else max(statuses)


def _lines(service: str, result: Comparison) -> Sequence[str]:
    name = f"{service} {result.journal.partition}"
    if not result.batches:
        return (f"{name}: nothing journalled that could be replayed",)
    told = (
        f"{name}: {result.inputs} inputs, {result.ticks} ticks, {result.outputs} outputs in "
        f"batches {result.batch_first} to {result.batch_last}"
    )
    if result.outputs_trimmed:
        told += f", {result.outputs_trimmed} of the outputs only by digest (trimmed)"
    if result.difference is None:
        return (f"{told}: equal",)
    first, *more = difference_lines(result.difference)
    return (f"{told}: {first}", *(f"  {line}" for line in more))
