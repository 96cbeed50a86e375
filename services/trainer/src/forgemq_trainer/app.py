"""Wiring of the trainer: scheduled steps in, trained steps and published weights out.

Order of a step: train, PublishedWeights and fast path, durable weights, PublishedWeights again,
durable checkpoint, TrainedStep. All after the training goes on while the next step computes its
gradients (`loop.py`). A crash between any two of them loses nothing and trains nothing twice: the
newest checkpoint decides where training continues, and what the log lacks of its step is written
again.

A run has one trainer: the folder is locked against a second process on the machine, and
trained-steps is written through the transactional id `trainer`. Once a newer trainer has opened
that writer, the broker refuses the older trainer's; only then does the newer one read the log, so
it reads all that the older one wrote.
"""

import asyncio
from pathlib import Path

import torch

from forgemq_contracts.lora import publishes_adapters
from forgemq_contracts.topics import (
    ADMITTED_GROUPS,
    FINISHED_COMPLETIONS,
    LOADED_WEIGHTS,
    MERGED_TREES,
    OFFERED_BROADCASTS,
    PUBLISHED_WEIGHTS,
    REPORTED_ENGINES,
    RETIRED_GROUPS,
    SCHEDULED_STEPS,
    TRAINED_STEPS,
    Topic,
)
from forgemq_settings.environment import parse
from forgemq_shell.service import Context
from forgemq_trainer.completion_source import follow_completions
from forgemq_trainer.lane_watch import watch_lanes
from forgemq_trainer.loop import TrainingLoop
from forgemq_trainer.previous_lives import TrainerLife, read_previous_lives
from forgemq_trainer.publisher import EnginePaths, Publisher
from forgemq_trainer.ranks.alone import ALONE, AnyRanks
from forgemq_trainer.ranks.ranks import check_device, check_world_size, device_of, launch_of
from forgemq_trainer.relay_path import relay_of
from forgemq_trainer.settings import TrainerSettings
from forgemq_trainer.storage.folders import lock_folder
from forgemq_trainer.store import Store
from forgemq_trainer.training import Training
from forgemq_trainer.weight_paths import Broadcasts, broadcasts_of

CONSUMES: tuple[Topic, ...] = (
    SCHEDULED_STEPS,
    MERGED_TREES,
    REPORTED_ENGINES,
    LOADED_WEIGHTS,
    TRAINED_STEPS,
    PUBLISHED_WEIGHTS,
    ADMITTED_GROUPS,
    RETIRED_GROUPS,
    FINISHED_COMPLETIONS,
)
PRODUCES: tuple[Topic, ...] = (TRAINED_STEPS, PUBLISHED_WEIGHTS, OFFERED_BROADCASTS)


async def main(context: Context, *, ranks: AnyRanks = ALONE) -> None:
    """Train scheduled steps until the last one, or until the context says stop.

    Args:
        context: Log, blobs, configuration and telemetry.
        ranks: All ranks of this trainer; this process is the first.

    Raises:
        FencedTrainerError: a newer trainer of this run has published.
        FencedError: a newer trainer of this run has started.
        FolderInUseError: another process trains in the folder.
        RankLostError: another rank died or missed its deadline.
        SettingsError: the configuration or the settings ask for something unsupported.
    """
    settings = parse(TrainerSettings, prefix="FORGEMQ_TRAINER_", environ=context.environ)
    launch = launch_of(context.environ)
    check_world_size(launch, configured=context.configuration.trainer.world_size)
    gpus = torch.cuda.device_count()
    device = device_of(settings.device, launch=launch, gpus=gpus)
    check_device(device, gpus=gpus)
    broadcasts = broadcasts_of(settings, device=device)
    with lock_folder(Path(settings.folder)):
        await _train(context, settings, broadcasts, device=device, ranks=ranks)
        # Only after a regular end: after an error the other ranks may be gone, and this process
        # ends anyway.
        ranks.close()


async def _train(
    context: Context,
    settings: TrainerSettings,
    broadcasts: Broadcasts | None,
    *,
    device: str,
    ranks: AnyRanks,
) -> None:
    configuration = context.configuration
    # First of all: from here on the broker refuses an older trainer's steps, so what is read below
    # is final.
    claim = await context.log.transaction_writer("trainer")
    store = Store(
        settings,
        blobs=context.blobs.uri,
        configuration=configuration,
        telemetry=context.telemetry,
        is_stopping=context.stop.is_set,
    )
    checkpoint = await asyncio.to_thread(store.newest_checkpoint)
    previous = await read_previous_lives(context.log)
    lineage = previous.next_lineage(checkpoint)
    await asyncio.to_thread(store.begin_after, checkpoint)
    life = TrainerLife(lineage=lineage, claim=claim, writer=await context.log.writer())
    async with asyncio.TaskGroup() as tasks:
        # An adapter is a few MB, and SGLang loads it from a folder only.
        paths = (
            EnginePaths()
            if publishes_adapters(configuration.lora)
            else EnginePaths(broadcasts=broadcasts, relay=relay_of(settings))
        )
        publisher = Publisher(context, settings, life=life, paths=paths, tasks=tasks)
        # Before the model is loaded, which may take minutes: then nothing waits for it below.
        known = asyncio.Event()
        watch = watch_lanes(context, publisher, lineage=life.lineage, known=known)
        watching = [tasks.create_task(watch)]
        try:
            training = await asyncio.to_thread(
                Training, configuration, device=device, checkpoint=checkpoint, ranks=ranks
            )
            loop = TrainingLoop(
                context, settings, store=store, publisher=publisher, life=life, tasks=tasks
            )
            watching.append(tasks.create_task(follow_completions(context, loop.fresh)))
            # The first publication offers its version to the lanes that are known to live.
            await known.wait()
            await loop.run(training, checkpoint, previous)
        finally:
            # They never end by themselves, and the group waits for all its tasks.
            for task in watching:
                task.cancel()
            await publisher.close()
