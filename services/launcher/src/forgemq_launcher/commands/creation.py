"""`forgemq create`: puts a run on a broker; people or a cluster start its services."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from forgemq_bus.kafka import KafkaLog
from forgemq_bus.kafka_runs import runs_on_broker
from forgemq_contracts.read_tasks import ReadTasks
from forgemq_contracts.run import RunConfiguration, StartedRun
from forgemq_contracts.run_changes import FieldChange
from forgemq_contracts.task_files import FoundTasks
from forgemq_contracts.topics import TRAINED_STEPS
from forgemq_launcher.core.configuration import next_run
from forgemq_launcher.core.task_changes import task_changes
from forgemq_launcher.records.announcement import next_start, start_before
from forgemq_launcher.records.run_log import open_run_log
from forgemq_launcher.records.run_topics import write_start
from forgemq_launcher.upkeep.services import SERVICES
from forgemq_settings.environment import SettingsError, parse
from forgemq_shell.announced_runs import announced_runs
from forgemq_shell.broker_wait import wait_for_broker
from forgemq_shell.clock import now_ms
from forgemq_shell.connection import kafka_connection
from forgemq_shell.service import ServiceSettings

REQUIRED = {
    "agents": "FORGEMQ_AGENTS_GATEWAY_URL, _ADMIN_KEY, _CONFIGURATION",
    "gateway": "FORGEMQ_GATEWAY_ADMIN_KEY",
    "inference": "FORGEMQ_INFERENCE_LANE, FORGEMQ_INFERENCE_ENGINE_URL; one for each engine",
    "trainer": "FORGEMQ_TRAINER_FOLDER",
}
"""Settings without a default, by service; the services refuse to start without them."""


_TRY_S_MAX = 10.0
"""One try of a broker that is still starting, so that each can be reported."""


class ReadAgain(Protocol):
    """Reads a run's files of tasks, and compares them with what an earlier start had."""

    def __call__(self, *, known: Sequence[ReadTasks]) -> FoundTasks:
        """As `task_files.found_tasks`."""


class TasksOfFiles(NamedTuple):
    """What a run's files of tasks have; nothing if they cannot be read on this machine."""

    found: FoundTasks
    read_again: ReadAgain

    def beside(self, known: Sequence[ReadTasks]) -> FoundTasks:
        """The same, compared with what the run's newest start had."""
        is_same = not known or known == self.found.tasks
        return self.found if is_same else self.read_again(known=known)


async def wait_for_named_broker(environ: Mapping[str, str], *, say: Callable[[str], None]) -> None:
    """Return when the broker that FORGEMQ_KAFKA names answers; waits as long as services do.

    Args:
        environ: FORGEMQ_SERVICE_START_TIMEOUT_S bounds the wait.
        say: Gets a line after every try that failed.

    Raises:
        LogUnavailableError: it did not answer in time.
        SettingsError: FORGEMQ_KAFKA is not set.
    """
    timeout_s = parse(ServiceSettings, prefix="FORGEMQ_SERVICE_", environ=environ).start_timeout_s
    connection = kafka_connection(environ)
    try_s = min(connection.retry_s, _TRY_S_MAX)
    log = KafkaLog(msgspec.structs.replace(connection, retry_s=try_s), run="")
    try:
        await wait_for_broker(
            log,
            timeout_s=timeout_s,
            say=lambda cause: say(f"waiting up to {timeout_s:g} s for the broker: {cause}"),
        )
    finally:
        await log.close()


async def take_number(
    configuration: RunConfiguration, environ: Mapping[str, str]
) -> RunConfiguration:
    """The configuration with the lowest number in its id that the broker has not seen.

    It is taken with the first topic of the run, which one of several commands makes.
    """
    connection, name = kafka_connection(environ), configuration.run.rpartition("-")[0]
    while True:
        shared = KafkaLog(connection, run="")
        try:
            announced = [each.started.run for each in await announced_runs(shared)]
        finally:
            await shared.close()
        taken = [*announced, *await runs_on_broker(connection)]
        made = msgspec.structs.replace(configuration, run=next_run(name, taken=taken))
        log = KafkaLog(connection, run=made.run)
        try:
            if await log.create_topics({TRAINED_STEPS.name: 1}):
                return made
        finally:
            await log.close()


async def create_run(
    configuration: RunConfiguration,
    environ: Mapping[str, str],
    *,
    blobs: str,
    tasks: TasksOfFiles,
    say: Callable[[str], None],
) -> StartedRun:
    """Create the topics of a run and announce it on the broker that FORGEMQ_KAFKA names.

    A run that is announced as it is asked for is left alone: a pod may create it at every start.
    One that was deleted is made again as a new run.

    Args:
        configuration: Of the run.
        environ: Names the broker.
        blobs: Address of the blob store.
        tasks: Of its files.
        say: Gets a line for each field in which the run differs from how it was announced before.

    Raises:
        SettingsError: FORGEMQ_KAFKA is not set.
        ConfigurationError: a field differs from the run's newest start and must stay, or its files
            no longer begin with the tasks that the run has had.
        PartitionCountError: a topic has another number of partitions.
    """
    connection = kafka_connection(environ)
    async with open_run_log(connection, configuration, blobs=blobs) as log:
        announced = await start_before(log, configuration.run)
        known = announced.tasks if announced else ()
        found = tasks.beside(known)
        added = tuple(task_changes(known, found))
        started = await next_start(log, configuration, blobs=blobs, now_ms=now_ms())
        started = msgspec.structs.replace(
            started, tasks=found.tasks or known, changes=(*started.changes, *added)
        )
    if announced and not added and _is_as_asked(announced, configuration, blobs=blobs):
        return announced
    await write_start(connection, started)
    if announced:
        moved = [FieldChange("blobs", announced.blobs, blobs)] if announced.blobs != blobs else []
        for change in (*started.changes, *moved):
            say(f"run {started.run} is announced again with {change}")
        say("its services that are up go by it from their next start on")
    return started


def _is_as_asked(announced: StartedRun, configuration: RunConfiguration, *, blobs: str) -> bool:
    return (announced.configuration, announced.blobs) == (configuration, blobs)


def blobs_address(environ: Mapping[str, str]) -> str:
    """Address of the blob store that FORGEMQ_BLOBS names; a folder by its absolute path.

    Services and engines read it from the run's record, each in the folder it was started in.

    Raises:
        SettingsError: FORGEMQ_BLOBS is not set.
    """
    blobs = environ.get("FORGEMQ_BLOBS")
    if not blobs:
        raise SettingsError("FORGEMQ_BLOBS: must be set: where all services reach the blob store")
    return blobs if "://" in blobs else str(Path(blobs).absolute())


def next_commands(started: StartedRun, *, kafka: str) -> str:
    """What a person types next: the environment of all services, and each one's command.

    Args:
        started: The run that was announced.
        kafka: Address of the broker.
    """
    lines = [
        f"run {started.run} is announced, its blobs are in {started.blobs}",
        f"export FORGEMQ_RUN={started.run} FORGEMQ_KAFKA={kafka}",
        "then each of (docs/your_services.md):",
    ]
    for service in SERVICES:
        command = f"  python -m forgemq_{service}"
        lines.append(f"{command:<29} {REQUIRED.get(service, '')}".rstrip())
    return "\n".join(lines)
