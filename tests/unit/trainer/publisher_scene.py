"""A publisher on a log in memory, with given ways to engines."""

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from forgemq_bus.blobs import BlobStore
from forgemq_bus.memory import MemoryLog
from forgemq_contracts.run import StartedRun
from forgemq_shell.service import Context
from forgemq_telemetry.telemetry import Telemetry
from forgemq_trainer.fast_path import FastPaths
from forgemq_trainer.previous_lives import TrainerLife
from forgemq_trainer.publisher import EnginePaths, Publisher
from forgemq_trainer.settings import TrainerSettings
from tests.small_run import small_run


@asynccontextmanager
async def publishing(
    folder: Path, paths: FastPaths, *, telemetry: Telemetry | None = None
) -> AsyncIterator[Publisher]:
    """The publisher of a run's first trainer; its transfers end with the block."""
    log = MemoryLog(run="r")
    configuration = small_run(group_partitions=1)
    context = Context(
        started=StartedRun(run="r", configuration=configuration, blobs=str(folder), started_ms=0),
        log=log,
        blobs=BlobStore(str(folder), run="r"),
        telemetry=telemetry or Telemetry(service="trainer", stream=io.StringIO()),
        stop=asyncio.Event(),
        environ={},
    )
    life = TrainerLife(
        lineage=1, claim=await log.transaction_writer("trainer"), writer=await log.writer()
    )
    async with asyncio.TaskGroup() as tasks:
        settings = TrainerSettings(folder=str(folder))
        yield Publisher(
            context, settings, life=life, paths=EnginePaths(broadcasts=paths), tasks=tasks
        )
