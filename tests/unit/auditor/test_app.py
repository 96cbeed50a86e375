"""The auditor as a whole, on a log in memory."""

import asyncio
import io
from collections.abc import Sequence
from pathlib import Path

from forgemq_auditor.app import main
from forgemq_bus.blobs import BlobStore
from forgemq_bus.log import Isolation, Place
from forgemq_bus.memory import MemoryLog
from forgemq_bus.partitions import partition_counts
from forgemq_shell.service import Context
from forgemq_telemetry.telemetry import Telemetry
from tests.small_run import small_run
from tests.unit.run_view.synthetic import started


class LongLog(MemoryLog):
    """Looking at all of it takes longer than any test."""

    is_looked_at: asyncio.Event

    async def end_positions(
        self, places: Sequence[Place], *, isolation: Isolation = "committed"
    ) -> dict[Place, int]:
        if isolation == "uncommitted":
            self.is_looked_at.set()
            await asyncio.sleep(3600)
        return await super().end_positions(places, isolation=isolation)


async def test_a_sweep_that_takes_long_does_not_hold_up_the_end(tmp_path: Path):
    log = LongLog(run="r")
    log.is_looked_at = asyncio.Event()
    await log.create_topics(partition_counts(small_run(group_partitions=2)))
    context = Context(
        started=started(),
        log=log,
        blobs=BlobStore(str(tmp_path), run="r"),
        telemetry=Telemetry(service="auditor", stream=io.StringIO()),
        stop=asyncio.Event(),
        environ={},
    )
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(main(context))
        await log.is_looked_at.wait()
        context.stop.set()
