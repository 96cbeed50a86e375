"""Creates the topics of a run and puts its start and end on the log."""

from collections.abc import Mapping

from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_bus.log import Log
from forgemq_bus.partitions import partitions_of
from forgemq_contracts import topics
from forgemq_contracts.messages import Output
from forgemq_contracts.run import EndedRun, RunConfiguration, StartedRun
from forgemq_contracts.steps import TrainedStep
from forgemq_contracts.topics import ENDED_RUNS, STARTED_RUNS, TRAINED_STEPS
from forgemq_run_view.reading import read_all
from forgemq_settings.environment import SettingsError
from forgemq_shell.connection import kafka_connection
from forgemq_shell.records import emit_of
from forgemq_telemetry.clock import now_ms


async def create_topics(log: Log, configuration: RunConfiguration) -> int:
    """Create every topic of the run and its dead-letter topic; returns how many there are."""
    counts: dict[str, int] = {}
    for topic in topics.ALL:
        counts[topic.name] = len(partitions_of(topic, configuration))
        if topic.has_dlq:
            counts[topic.dlq_name] = counts[topic.name]
    await log.create_topics(counts)
    return len(counts)


async def last_trained_step(log: Log, configuration: RunConfiguration) -> int:
    """The highest step that is trained; -1 where the run is new."""
    last = -1
    async for records in read_all(log, partitions_of(TRAINED_STEPS, configuration)):
        for record in records:
            trained = topics.decode(TRAINED_STEPS, record.value)
            assert isinstance(trained, TrainedStep)
            last = max(last, trained.step)
    return last


async def create(configuration: RunConfiguration, environ: Mapping[str, str]) -> None:
    """Create topics and announce the run on the broker that the settings name.

    Raises:
        SettingsError: FORGEMQ_KAFKA or FORGEMQ_BLOBS is not set.
    """
    blobs = environ.get("FORGEMQ_BLOBS")
    if not blobs:
        raise SettingsError("FORGEMQ_BLOBS: must be set: where all services reach the blob store")
    connection = kafka_connection(environ)
    log = KafkaLog(connection, run=configuration.run)
    try:
        await create_topics(log, configuration)
    finally:
        await log.close()
    await announce(
        connection,
        StartedRun(
            run=configuration.run, configuration=configuration, blobs=blobs, started_ms=now_ms()
        ),
    )


async def announce(connection: KafkaConnection, started: StartedRun) -> None:
    """Put the run on the log; its services take their configuration from there."""
    await _write(connection, Output(topic=STARTED_RUNS.name, partition=0, record=started))


async def conclude(connection: KafkaConnection, ended: EndedRun) -> None:
    """Put the run's end on the log."""
    await _write(connection, Output(topic=ENDED_RUNS.name, partition=0, record=ended))


async def _write(connection: KafkaConnection, output: Output) -> None:
    # A log without a blob store: who reads these records does not know yet where the blobs lie.
    log = KafkaLog(connection, run="")
    try:
        writer = await log.writer()
        await writer.write(emit_of(output))
    finally:
        await log.close()
