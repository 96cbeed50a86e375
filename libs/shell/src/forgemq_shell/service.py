"""Starts and ends every service: settings, log, run configuration, signals, exit status."""

import asyncio
import signal
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from forgemq_bus.blobs import BlobStore
from forgemq_bus.errors import AccessError, PartitionCountError
from forgemq_bus.kafka import KafkaLog
from forgemq_bus.log import Log
from forgemq_contracts.run import RunConfiguration, StartedRun
from forgemq_settings.environment import SettingsError, parse
from forgemq_settings.user_code import add_code_paths
from forgemq_shell.connection import kafka_connection, run_id
from forgemq_shell.interruption import result_before
from forgemq_shell.library_logs import library_logs
from forgemq_shell.loop_watch import LoopWatch, keep_alive_file
from forgemq_shell.partition_watch import check_partitions, watch_partitions
from forgemq_shell.patience import PatientBlobStore, patiently
from forgemq_shell.restore import NewerLogicError
from forgemq_shell.started_run import UnreadableRunError, started_run
from forgemq_telemetry.causes import causes
from forgemq_telemetry.settings import TelemetrySettings
from forgemq_telemetry.telemetry import Telemetry, open_telemetry

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
"""As argparse and the shell use it: the caller is wrong, so a restart cannot help."""


_LOOK_S_MAX = 10.0
"""Three tries of a connection, also on a busy machine."""

_REFUSED = (
    SettingsError,
    AccessError,
    NewerLogicError,
    PartitionCountError,
    UnreadableRunError,
)


class ServiceSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Read from `FORGEMQ_SERVICE_*`, the same for every service."""

    start_timeout_s: Annotated[
        float, Meta(gt=0, description="Wait this long for the run's record.")
    ] = 120.0
    stop_grace_s: Annotated[
        float, Meta(gt=0, description="After a signal `main` has this long, then it is cancelled.")
    ] = 15.0
    alive_file: Annotated[
        str, Meta(description="Touched every 5 s while the service works; empty: no file.")
    ] = ""
    silent_s_max: Annotated[
        float,
        Meta(gt=0, description="A loop that does not turn for longer stops the touches."),
    ] = 300.0
    partitions_checked_every_s: Annotated[
        float,
        Meta(gt=0, le=3600, description="How often topics are asked for partitions they gained."),
    ] = 30.0
    instance: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9._-]*$",
            max_length=200,
            description="Name of this process among its replicas, the same after a restart: it "
            "then gets its partitions back and no other process notices. Empty: a restart joins "
            "the group as a new member.",
        ),
    ] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a service's `main` gets.

    Attributes:
        started: The run's newest record on started-runs.
        log: Closed by the shell after `main`.
        telemetry: Events, metrics and spans under the service's name.
        stop: Set by SIGTERM and SIGINT; `main` then finishes what it holds and returns.
        environ: For the service's own settings.
        loop_watch: Each loop of `main` calls it whenever it turns.
    """

    started: StartedRun
    log: Log
    blobs: BlobStore
    telemetry: Telemetry
    stop: asyncio.Event
    environ: Mapping[str, str]
    loop_watch: LoopWatch = field(default_factory=LoopWatch)

    @property
    def configuration(self) -> RunConfiguration:
        """The run's configuration."""
        return self.started.configuration


Main: TypeAlias = Callable[[Context], Awaitable[None]]


def run_service(
    name: str,
    main: Main,
    environ: Mapping[str, str],
    *,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> int:
    """Run a service until it ends or gets a signal; returns the exit status.

    Without a `loop_factory` it runs on asyncio's own event loop.

    0: ended or stopped. 1: failed, with one line and a traceback on stderr. 2: its settings were
    refused, also by the broker, or the run's topics or record are not as this release reads them,
    with one line.
    """
    telemetry = Telemetry(service=name)
    try:
        telemetry = _open_telemetry(name, environ)
        with library_logs(telemetry), asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(_serve(main, environ, telemetry))
    except KeyboardInterrupt:
        return EXIT_OK
    except Exception as error:  # noqa: BLE001 - outermost: report any error once, then exit
        found = causes(error)
        if all(isinstance(cause, _REFUSED) for cause in found):
            telemetry.event("refused", error="; ".join(map(str, found)))
            return EXIT_REFUSED
        telemetry.event("failed", error="; ".join(f"{type(c).__name__}: {c}" for c in found))
        traceback.print_exception(error)
        return EXIT_FAILED
    finally:
        telemetry.close()
    return EXIT_OK


def _open_telemetry(name: str, environ: Mapping[str, str]) -> Telemetry:
    settings = parse(TelemetrySettings, prefix="FORGEMQ_TELEMETRY_", environ=environ)
    if settings.exporter == "none":
        return Telemetry(service=name)
    return open_telemetry(
        name,
        run=run_id(environ),
        settings=settings,
        instance=environ.get("FORGEMQ_SERVICE_INSTANCE", ""),
        lane=environ.get(f"FORGEMQ_{name.upper()}_LANE", ""),
    )


async def _serve(main: Main, environ: Mapping[str, str], telemetry: Telemetry) -> None:
    settings = parse(ServiceSettings, prefix="FORGEMQ_SERVICE_", environ=environ)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop_watch = LoopWatch()
    async with asyncio.TaskGroup() as group:
        work = group.create_task(
            _run_main(
                main,
                environ,
                settings=settings,
                telemetry=telemetry,
                stop=stop,
                loop_watch=loop_watch,
            )
        )
        beside = [_cancel_after_grace(stop, work, settings.stop_grace_s, telemetry)]
        if settings.alive_file:
            path, silent_s_max = Path(settings.alive_file), settings.silent_s_max
            beside.append(keep_alive_file(path, loop_watch, telemetry, silent_s_max=silent_s_max))
        tasks = [group.create_task(coroutine) for coroutine in beside]
        await asyncio.wait([work])
        for task in tasks:
            task.cancel()


async def _cancel_after_grace(
    stop: asyncio.Event, work: "asyncio.Task[None]", grace_s: float, telemetry: Telemetry
) -> None:
    """Wait for the signal, then give `work` its grace, then cancel it."""
    await stop.wait()
    telemetry.event("stopping")
    await asyncio.wait([work], timeout=grace_s)
    if not work.done():
        telemetry.event("stopped_late", grace_s=grace_s)
        work.cancel()


async def _run_main(
    main: Main,
    environ: Mapping[str, str],
    *,
    settings: ServiceSettings,
    telemetry: Telemetry,
    stop: asyncio.Event,
    loop_watch: LoopWatch,
) -> None:
    started = await result_before(
        stop, _read_started_run(environ, settings.start_timeout_s, telemetry)
    )
    if started is None:
        return
    configuration = started.configuration
    add_code_paths(configuration.code_paths)
    blobs = PatientBlobStore(
        environ.get("FORGEMQ_BLOBS") or started.blobs,
        run=configuration.run,
        telemetry=telemetry,
        has_folder=started.has_blob_folder,
    )
    await result_before(stop, patiently(blobs.check_folder, telemetry=telemetry))
    if stop.is_set():
        return
    log = KafkaLog(
        kafka_connection(environ),
        run=configuration.run,
        blobs=blobs,
        inline_bytes_max=configuration.log.inline_bytes_max,
        instance=settings.instance,
    )
    context = Context(
        started=started,
        log=log,
        blobs=blobs,
        telemetry=telemetry,
        stop=stop,
        environ=environ,
        loop_watch=loop_watch,
    )
    telemetry.event("started", run=configuration.run)
    try:
        await _report_weak_settings(log, telemetry)
        await check_partitions(log, configuration)
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(
                watch_partitions(log, configuration, every_s=settings.partitions_checked_every_s)
            )
            await main(context)
            watching.cancel()
    finally:
        await log.close()
    telemetry.event("ended", run=configuration.run)


async def _report_weak_settings(log: KafkaLog, telemetry: Telemetry) -> None:
    """Name settings of the cluster that can cost records; the service runs all the same."""
    for fault in await log.setting_faults():
        telemetry.event(
            "weak_setting",
            setting=fault.setting,
            value=fault.value,
            where=fault.where,
            rule=fault.rule,
        )


async def _read_started_run(
    environ: Mapping[str, str], timeout_s: float, telemetry: Telemetry
) -> StartedRun:
    run = run_id(environ)
    connection = kafka_connection(environ)
    # A look at a broker that is still starting ends soon, so that each wait can be reported.
    look_s = min(connection.retry_s, _LOOK_S_MAX)
    log = KafkaLog(msgspec.structs.replace(connection, retry_s=look_s), run=run)

    def say(cause: str) -> None:
        telemetry.event(
            "waiting_for_run", run=run, kafka=connection.bootstrap, cause=cause, limit_s=timeout_s
        )

    try:
        return await started_run(log, run, timeout_s=timeout_s, say=say)
    finally:
        await log.close()
