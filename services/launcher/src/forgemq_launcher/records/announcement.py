"""The record of a start of a run: what it continues, and what differs from the start before."""

from forgemq_bus.blobs import BlobStore
from forgemq_bus.errors import UnknownPlaceError
from forgemq_bus.kept_records import message_of, read_all
from forgemq_bus.log import Log, Place
from forgemq_bus.partitions import partitions_of
from forgemq_contracts.run import RunConfiguration, StartedRun
from forgemq_contracts.run_changes import FieldChange, changes, check_changes
from forgemq_contracts.steps import ScheduledStep
from forgemq_contracts.topics import SCHEDULED_STEPS, STARTED_RUNS, TRAINED_STEPS
from forgemq_launcher.core.completed_run import how_to_train_on, nothing_left
from forgemq_launcher.core.configuration import ConfigurationError
from forgemq_launcher.records.run_end import end_of
from forgemq_launcher.records.run_topics import create_topics, last_trained_step
from forgemq_shell.started_run import newest_start


async def next_start(
    log: Log, configuration: RunConfiguration, *, blobs: str, now_ms: int, plays_here: bool = False
) -> StartedRun:
    """Create what is missing of the run's topics; the record of this start, not written yet.

    Args:
        log: Of the run; without a launcher its services may be up.
        configuration: Of this start.
        blobs: Address of the blob store.
        now_ms: When the run starts.
        plays_here: All services of the run are on this machine, so a local folder of blobs is one
            of this machine.

    Raises:
        BlobError: the run's folder of blobs cannot be made, or is not there again.
        ConfigurationError: a field differs from the start before and must stay.
        PartitionCountError: a topic has another number of partitions.
    """
    found: tuple[FieldChange, ...] = ()
    await log.create_topics({STARTED_RUNS.name: 1})
    previous = await start_before(log, configuration.run)
    if previous is not None:
        try:
            check_changes(previous.configuration, configuration)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        found = changes(previous.configuration, configuration)
    await create_topics(log, configuration)
    if any(change.name == "trainer.steps" for change in found):
        await _check_steps(log, configuration)
    return StartedRun(
        run=configuration.run,
        configuration=configuration,
        blobs=blobs,
        started_ms=now_ms,
        resumed_from_step=await last_trained_step(log, configuration),
        changes=tuple(map(str, found)),
        tasks=() if previous is None else previous.tasks,
        has_blob_folder=await _has_blob_folder(
            blobs, previous, run=configuration.run, plays_here=plays_here
        ),
    )


async def _has_blob_folder(
    blobs: str, previous: StartedRun | None, *, run: str, plays_here: bool
) -> bool:
    if previous is None:
        return await BlobStore(blobs, run=run).make_folder(makes_address=plays_here)
    if plays_here:
        await BlobStore(blobs, run=run, has_folder=previous.has_blob_folder).check_folder()
    return previous.has_blob_folder


async def check_unfinished(log: Log, configuration: RunConfiguration) -> None:
    """Refuse to go on with a run that is completed: everything would start, and end at once.

    Raises:
        ConfigurationError: says how to train on.
    """
    started = await start_before(log, configuration.run)
    ended = None if started is None else await end_of(log, started)
    if ended is not None and ended.reason == "completed":
        raise ConfigurationError(nothing_left(configuration))


async def start_before(log: Log, run: str) -> StartedRun | None:
    """The newest start of a run that has topics; None of one that is new or was deleted."""
    try:
        await log.first_positions([Place(TRAINED_STEPS.name, 0)])
    except UnknownPlaceError:
        return None  # Starts of a deleted run stay on the topic that all runs share.
    return await newest_start(log, run)


async def _check_steps(log: Log, configuration: RunConfiguration) -> None:
    """Refuse another last step once the scheduler has written which one it is.

    Its record of a step says whether the step is the last, and is replayed with the newest
    configuration.
    """
    scheduled, last = 0, -1
    async for records in read_all(log, partitions_of(SCHEDULED_STEPS, configuration)):
        for record in records:
            step = message_of(record).record
            assert isinstance(step, ScheduledStep)
            scheduled = max(scheduled, step.step + 1)
            last = step.step if step.is_last else last
    if last >= 0:
        raise ConfigurationError(
            f"trainer.steps: step {last} is scheduled as the last one, so the run cannot go on: "
            f"{how_to_train_on(configuration)}"
        )
    if configuration.trainer.steps <= scheduled:
        raise ConfigurationError(
            f"trainer.steps: {scheduled} steps are scheduled already, and none of them as the "
            f"last: at least {scheduled + 1}, got {configuration.trainer.steps}"
        )
