"""The log of a run for a command that looks at it, whether the run is up, stopped or elsewhere."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial

import msgspec

from forgemq_bus.blobs import BlobStore
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_bus.log import Log
from forgemq_contracts.run import StartedRun
from forgemq_launcher.display.lines import say, terminal
from forgemq_launcher.records.known_runs import absence_of
from forgemq_launcher.records.run_log import open_run_log
from forgemq_launcher.records.told_reading import told_reading
from forgemq_launcher.run_folder import RunFolder, RunFolderError
from forgemq_launcher.upkeep.broker import RunBroker
from forgemq_settings.environment import SettingsError
from forgemq_shell.started_run import RunNotStartedError, started_run

STARTED_RUN_TIMEOUT_S = 30.0
"""A broker that was started for the command answers within 10 s, also after a kill."""
OWN_RECORD_TIMEOUT_S = 5.0
"""For the record of a run that is down on its own broker, to which nobody writes it any more."""


@asynccontextmanager
async def run_broker(
    folder: RunFolder, environ: Mapping[str, str]
) -> AsyncIterator[tuple[Mapping[str, str], KafkaConnection]]:
    """The broker of a run, and the environment that names it to a process.

    It is the one that FORGEMQ_KAFKA names, else the run's own: as it is while the run is up, else
    started on its data for this block.

    Raises:
        RunFolderError: the run is not known here and FORGEMQ_KAFKA is not set, its folder has
            another name, or it is down and was never announced on its own broker.
        RunNotStartedError: the broker that FORGEMQ_KAFKA names has no topics of the run.
        LogUnavailableError: that broker does not answer.
    """
    if not environ.get("FORGEMQ_KAFKA"):
        folder.check_name()
        ports = folder / "kafka" / "ports.json"
        if not ports.is_file():
            raise RunFolderError(
                f"run {folder.run} has no broker of its own: set FORGEMQ_KAFKA to the one that it "
                f"was started with; if it ended before it had one, {_ways_on(folder.run)}"
            )
        if folder.is_up():
            # Its broker belongs to the launcher that holds the run.
            port = msgspec.json.decode(ports.read_bytes(), type=dict[str, int])["broker"]
            environ = {**environ, "FORGEMQ_KAFKA": f"127.0.0.1:{port}"}
    broker = RunBroker(folder / "kafka", environ=environ, note=lambda _: None)
    try:
        await broker.start()
        if broker.is_own:
            await _check_announced(broker.connection, folder.run)
        else:
            await _check_there(broker.connection, folder)
        yield {**environ, "FORGEMQ_KAFKA": broker.connection.bootstrap}, broker.connection
    finally:
        await broker.stop()


@asynccontextmanager
async def run_to_read(
    folder: RunFolder, environ: Mapping[str, str], *, times: int = 1
) -> AsyncIterator[tuple[Log, StartedRun]]:
    """As `run_on_broker`, for a command that reads the log and ends.

    While that takes long, stderr says how far it is, and how many `times` most records are read.
    """
    errors = terminal(is_stderr=True)
    async with (
        run_on_broker(folder, environ) as (log, started),
        told_reading(log, started.configuration, say=partial(say, errors), times=times),
    ):
        yield log, started


@asynccontextmanager
async def run_on_broker(
    folder: RunFolder, environ: Mapping[str, str]
) -> AsyncIterator[tuple[KafkaLog, StartedRun]]:
    """The log of a run and its newest start; a run that was started by hand needs no folder here.

    Raises:
        RunFolderError: the run is not known here and FORGEMQ_KAFKA is not set.
        RunNotStartedError: the run is not on the broker, or not any more.
        LogUnavailableError: the broker does not answer.
        UnreadableRunError: a later release may have started it.
        SettingsError: the address of its blobs is of a kind that this machine cannot read.
    """
    async with run_broker(folder, environ) as (_, connection):
        announced = KafkaLog(connection, run=folder.run)
        try:
            started = await started_run(announced, folder.run, timeout_s=STARTED_RUN_TIMEOUT_S)
        finally:
            await announced.close()
        # The folder's before the record's: a folder of runs may have been moved since.
        own = str(folder / "blobs") if (folder / "blobs").is_dir() else started.blobs
        blobs = environ.get("FORGEMQ_BLOBS") or own
        _check_address(blobs, run=folder.run)
        async with open_run_log(connection, started.configuration, blobs=blobs) as log:
            yield log, started


async def _check_announced(connection: KafkaConnection, run: str) -> None:
    log = KafkaLog(connection, run=run)
    try:
        await started_run(log, run, timeout_s=OWN_RECORD_TIMEOUT_S)
    except RunNotStartedError as error:
        raise RunFolderError(
            f"run {run} ended before it was announced, so nothing is on its log: {_ways_on(run)}"
        ) from error
    finally:
        await log.close()


def _ways_on(run: str) -> str:
    return f"forgemq run FILE --resume {run} plays it, forgemq delete {run} removes it"


async def _check_there(connection: KafkaConnection, folder: RunFolder) -> None:
    """Raise RunNotStartedError if the run has no topics, unless a launcher here may make them."""
    absence = await absence_of(connection, folder.run)
    if absence and not (folder.path.is_dir() and folder.is_up()):
        raise RunNotStartedError(absence)


def _check_address(blobs: str, *, run: str) -> None:
    try:
        BlobStore(blobs, run=run)
    except (ImportError, ValueError) as error:
        raise SettingsError(f"FORGEMQ_BLOBS: the run's blobs are in {blobs}: {error}") from error
