"""Wiring of the trainer: scheduled steps in, trained steps and published weights out.

Order of a step: train, durable weights, durable checkpoint, TrainedStep, PublishedWeights, fast
path. A crash between any two of them loses nothing and trains nothing twice: the newest checkpoint
decides where training continues, and what the log lacks of its step is written again.

One trainer a run: the folder is locked against a second process on the machine, and trained-steps
is written through the transactional id `trainer`, by which the broker refuses every older trainer
from the moment a newer one has started, before that one reads where training stands.
"""

import asyncio
from pathlib import Path

import msgspec
import torch

from forgemq_bus.log import Place
from forgemq_contracts import topics
from forgemq_contracts.topics import (
    LOADED_WEIGHTS,
    MERGED_TREES,
    PUBLISHED_WEIGHTS,
    REPORTED_ENGINES,
    SCHEDULED_STEPS,
    TRAINED_STEPS,
    Topic,
)
from forgemq_contracts.weights import LoadedWeights, PublishedWeights, ReportedEngine
from forgemq_settings.environment import SettingsError, parse
from forgemq_shell.dead_letters import DeadLetters
from forgemq_shell.service import Context
from forgemq_trainer.core.lanes import LiveLanes
from forgemq_trainer.fast_path import FastPaths
from forgemq_trainer.history import FencedTrainerError, read_history
from forgemq_trainer.loop import TrainingLoop
from forgemq_trainer.publisher import Publisher
from forgemq_trainer.ranks.ranks import (
    Ranks,
    check_device,
    check_world_size,
    device_of,
    launch_of,
)
from forgemq_trainer.settings import TrainerSettings
from forgemq_trainer.storage.folders import held_folder
from forgemq_trainer.store import Store

CONSUMES: tuple[Topic, ...] = (
    SCHEDULED_STEPS,
    MERGED_TREES,
    REPORTED_ENGINES,
    LOADED_WEIGHTS,
    TRAINED_STEPS,
    PUBLISHED_WEIGHTS,
)
PRODUCES: tuple[Topic, ...] = (TRAINED_STEPS, PUBLISHED_WEIGHTS)

READ_TIMEOUT_S = 0.5
RECORDS_MAX = 256


async def main(context: Context, *, ranks: Ranks | None = None) -> None:
    """Train scheduled steps until the context says stop.

    Args:
        context: of the service.
        ranks: of which this is the first; None where it trains alone.

    Raises:
        FencedTrainerError: a newer trainer of this run has published.
        FencedError: a newer trainer of this run has started.
        FolderInUseError: another process trains in the folder.
        RankLostError: another rank is gone.
        SettingsError: the configuration asks for what this trainer does not do.
    """
    settings = parse(TrainerSettings, prefix="FORGEMQ_TRAINER_", environ=context.environ)
    configuration = context.configuration
    launch = launch_of(context.environ)
    check_world_size(launch, configured=configuration.trainer.world_size)
    device = device_of(settings.device, launch=launch)
    check_device(device, gpus=torch.cuda.device_count())
    fast_paths = fast_paths_of(settings, device=device)
    with held_folder(Path(settings.folder)):
        await _train(context, settings, fast_paths, ranks)
        if ranks is not None:
            ranks.close()


async def _train(
    context: Context,
    settings: TrainerSettings,
    fast_paths: FastPaths | None,
    ranks: Ranks | None,
) -> None:
    configuration = context.configuration
    claim = await context.log.transaction_writer("trainer")
    store = Store(
        settings.folder,
        blobs=context.blobs.uri,
        configuration=configuration,
        telemetry=context.telemetry,
    )
    checkpoint = await asyncio.to_thread(store.newest_checkpoint)
    history = await read_history(context.log)
    lineage = history.next_lineage(checkpoint)
    async with asyncio.TaskGroup() as tasks:
        publisher = Publisher(
            writer=await context.log.writer(),
            lanes=LiveLanes(timeout_s=settings.lane_lapse_s),
            fast_paths=fast_paths,
            group_prefix=f"{configuration.run}-{lineage}",
            deadline_s=settings.transfer_deadline_s,
            tasks=tasks,
            telemetry=context.telemetry,
        )
        loop = TrainingLoop(
            context=context,
            settings=settings,
            store=store,
            publisher=publisher,
            claim=claim,
            lineage=lineage,
            ranks=ranks,
        )
        watching = tasks.create_task(_watch(context, publisher, lineage=lineage))
        try:
            await loop.run(checkpoint, history)
        finally:
            watching.cancel()
            await publisher.close()


def fast_paths_of(settings: TrainerSettings, *, device: str) -> FastPaths | None:
    """The way into engines that the settings name; None where it is off.

    Raises:
        SettingsError: NCCL would have no GPU to send from.
    """
    if settings.fast_path == "off":
        return None
    if settings.fast_path == "nccl" and device == "cpu":
        raise SettingsError(
            "FORGEMQ_TRAINER_FAST_PATH=nccl sends from a GPU to GPUs: set "
            "FORGEMQ_TRAINER_DEVICE=cuda, or gloo, which reaches every engine"
        )
    return FastPaths(
        host=settings.host,
        backend=settings.fast_path,
        deadline_s=settings.transfer_deadline_s,
        device=device,
    )


async def _watch(context: Context, publisher: Publisher, *, lineage: int) -> None:
    """Follow lanes, and die when a newer trainer publishes."""
    lanes = range(context.configuration.log.lanes)
    places = [Place(PUBLISHED_WEIGHTS.name, 0)]
    places += [Place(topic.name, n) for topic in (REPORTED_ENGINES, LOADED_WEIGHTS) for n in lanes]
    reader = await context.log.reader(await context.log.end_positions(places))
    dead_letters = DeadLetters(context.log, await context.log.writer(), service="trainer")
    clock = asyncio.get_running_loop()
    try:
        while True:
            publisher.give_up_lapsed(at_s=clock.time())
            for record in await reader.read(timeout_s=READ_TIMEOUT_S, records_max=RECORDS_MAX):
                try:
                    fact = topics.decode(topics.BY_NAME[record.topic], record.value)
                except msgspec.ValidationError as error:
                    await dead_letters.bury(record, f"does not decode: {error}")
                    continue
                if isinstance(fact, ReportedEngine):
                    publisher.observe_engine(fact, at_s=clock.time())
                elif isinstance(fact, LoadedWeights):
                    publisher.observe_loaded(fact)
                elif isinstance(fact, PublishedWeights) and fact.lineage > lineage:
                    raise FencedTrainerError(
                        f"a trainer of lineage {fact.lineage} has published; this one is {lineage}"
                    )
    finally:
        await reader.close()
