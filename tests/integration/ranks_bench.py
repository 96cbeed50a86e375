"""A run that is announced on the broker, for trainers that are started as processes."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np

from forgemq_bus.blobs import BlobStore
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_bus.log import Emit
from forgemq_contracts import topics
from forgemq_contracts.run import StartedRun
from forgemq_contracts.steps import ScheduledStep
from forgemq_contracts.trees import MergedTree
from tests.unit.trainer.bench import Bench, create_topics
from tests.unit.trainer.scene import (
    agent_samples,
    configuration_of,
    merge,
    save_base,
    scheduled_step,
)


@asynccontextmanager
async def announced_bench(
    run: str, bootstrap: str, folder: Path, *, world_size: int
) -> AsyncIterator[Bench]:
    """A run with topics and a StartedRun record; the trainer's files are below the folder."""
    blobs = str(folder / "blobs")
    log = KafkaLog(KafkaConnection(bootstrap=bootstrap), run=run, blobs=BlobStore(blobs, run=run))
    try:
        await create_topics(log)
        await log.create_topics({topics.STARTED_RUNS.name: 1})
        base = save_base(folder / "base")
        made = msgspec.structs.replace(configuration_of(base, world_size=world_size), run=run)
        started = StartedRun(run=run, configuration=made, blobs=blobs, started_ms=0)
        writer = await log.writer()
        await writer.write(
            Emit(
                topic=topics.STARTED_RUNS.name,
                partition=0,
                key=run.encode(),
                value=topics.encode(started),
            )
        )
        yield Bench(log, lambda: log, made, folder / "trainer")
    finally:
        await log.close()


def work(steps: int) -> tuple[Sequence[MergedTree], Sequence[ScheduledStep]]:
    """The same trees each time, and steps of two of them each."""
    generator = np.random.default_rng(0)
    trees = [merge(agent_samples(generator), f"g-{number}") for number in range(2 * steps)]
    return trees, [
        scheduled_step(k, trees[2 * k : 2 * k + 2], is_last=k == steps - 1) for k in range(steps)
    ]
