"""Creates the topics of a run and writes its start and end."""

from forgemq_bus.decoding import decoded_record
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_bus.kept_records import read_all
from forgemq_bus.log import Log
from forgemq_bus.partitions import partition_counts, partitions_of
from forgemq_contracts.messages import Output
from forgemq_contracts.run import EndedRun, RunConfiguration, StartedRun
from forgemq_contracts.steps import TrainedStep
from forgemq_contracts.topics import ENDED_RUNS, OF_RUN, STARTED_RUNS, TRAINED_STEPS
from forgemq_shell.records import emit_of

NO_STEP = -1


async def create_topics(log: Log, configuration: RunConfiguration) -> int:
    """Create every topic of the run and its dead-letter topic; returns how many there are.

    Topics of lanes get the partitions that they lack.

    Raises:
        PartitionCountError: a topic exists with another number of partitions.
    """
    counts = partition_counts(configuration)
    of_lanes = {topic.name for topic in OF_RUN if topic.partitioned_by == "lane"}
    await log.create_topics(counts, may_grow=of_lanes)
    return len(counts)


async def last_trained_step(log: Log, configuration: RunConfiguration) -> int:
    """The highest step that is trained; -1 if the run is new."""
    last = NO_STEP
    async for records in read_all(log, partitions_of(TRAINED_STEPS, configuration)):
        for record in records:
            trained = decoded_record(record)
            assert isinstance(trained, TrainedStep)
            last = max(last, trained.step)
    return last


async def write_start(connection: KafkaConnection, started: StartedRun) -> None:
    """Write the record from which every service of the run takes its configuration."""
    await _write(connection, Output(topic=STARTED_RUNS.name, partition=0, record=started))


async def write_end(connection: KafkaConnection, ended: EndedRun) -> None:
    """Write how this start of the run ended."""
    await _write(connection, Output(topic=ENDED_RUNS.name, partition=0, record=ended))


async def _write(connection: KafkaConnection, output: Output) -> None:
    # A log without a blob store: readers of these records do not yet know where the blobs lie.
    log = KafkaLog(connection, run="")
    try:
        writer = await log.writer()
        await writer.write(emit_of(output))
    finally:
        await log.close()
