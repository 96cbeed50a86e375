"""One transform task on a log in memory, and what it wrote."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec

from forgemq_bus.blobs import BlobStore
from forgemq_bus.log import Emit, Place
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.groups import ScoredGroup
from forgemq_contracts.journal import JournalledBatch
from forgemq_contracts.messages import Core, Output
from forgemq_shell.records import emit_of
from forgemq_shell.task import TransformTask
from forgemq_shell.task_plan import TaskPlan
from forgemq_shell.transform_settings import TransformSettings
from forgemq_telemetry import Telemetry
from tests.simulation.counting_core import CountingCore
from tests.simulation.harness import records_of

SCORED = Place(topics.SCORED_GROUPS.name, 0)
MERGED = Place(topics.MERGED_GROUPS.name, 0)
JOURNAL = Place(topics.MERGER_JOURNAL.name, 0)
QUIET = TransformSettings(batch_linger_s=0.0, snapshot_every_batches=1000, snapshot_every_s=1e9)
TRACE = ("traceparent", b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01")


class ManualClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class World:
    """One task on a memory log, and the records it wrote."""

    def __init__(self, *, blobs: BlobStore | None = None, inline_bytes_max: int = 900_000) -> None:
        self.log = MemoryLog(run="r", blobs=blobs, inline_bytes_max=inline_bytes_max)
        self.clock = ManualClock()
        self.lines = io.StringIO()

    async def open(self) -> None:
        names = [SCORED.topic, MERGED.topic, JOURNAL.topic, f"{SCORED.topic}-dlq"]
        await self.log.create_topics(dict.fromkeys(names, 1))
        self._writer = await self.log.writer()

    def events(self, name: str) -> list[dict]:
        lines = [json.loads(line) for line in self.lines.getvalue().splitlines()]
        return [line for line in lines if line["event"] == name]

    def plan(
        self,
        settings: TransformSettings,
        *,
        tick_s: float,
        logic_version: int = 1,
        snapshots_since: int = 0,
    ) -> TaskPlan:
        return TaskPlan(
            service="merger",
            journal=JOURNAL,
            inputs=(SCORED,),
            tick_s=tick_s,
            logic_version=logic_version,
            settings=settings,
            snapshots_since=snapshots_since,
        )

    @asynccontextmanager
    async def task(
        self,
        settings: TransformSettings = QUIET,
        *,
        core: Core | None = None,
        tick_s: float = 0.0,
        logic_version: int = 1,
        snapshots_since: int = 0,
        is_killed: bool = False,
    ) -> AsyncIterator[TransformTask]:
        """Run the task; at the end it stops cleanly or is killed."""
        stop = asyncio.Event()
        task = TransformTask(
            self.plan(
                settings,
                tick_s=tick_s,
                logic_version=logic_version,
                snapshots_since=snapshots_since,
            ),
            log=self.log.open(),
            core=core or CountingCore(),
            telemetry=Telemetry(service="merger", stream=self.lines),
            stop=stop,
            clock_s=self.clock,
        )
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            running = group.create_task(task.run())
            yield task
            if is_killed:
                running.cancel()
            stop.set()

    async def handle_new(
        self, count: int, *, first: int = 0, settings: TransformSettings = QUIET
    ) -> None:
        """Run the task until this many new groups are handled, one group a batch."""
        async with self.task(settings):
            for number in range(first, first + count):
                await self.score(f"g-{number}")
                await self.until_merged(number + 1)

    async def score(self, *group_ids: str) -> None:
        await self.write(
            [
                emit_of(
                    Output(
                        topic=SCORED.topic,
                        partition=0,
                        record=ScoredGroup(group_id=g, domain="d", purpose="train", episodes=()),
                    ),
                    headers=(TRACE,),
                )
                for g in group_ids
            ]
        )

    async def write(self, emits: Sequence[Emit]) -> None:
        await self._writer.write_all(emits)

    async def journal(self) -> list[JournalledBatch]:
        written = (await records_of(self.log, [JOURNAL])).get(JOURNAL, [])
        return [msgspec.msgpack.decode(value, type=JournalledBatch) for _, value in written]

    async def merged(self) -> list[tuple[str, int]]:
        written = (await records_of(self.log, [MERGED])).get(MERGED, [])
        records = [topics.decode(topics.MERGED_GROUPS, value) for _, value in written]
        return [(record.group_id, record.loss_tokens) for record in records]

    async def until_merged(self, count: int) -> None:
        await self.until(lambda: self.log_size(MERGED), count)

    async def until(self, size: Callable[[], int], count: int) -> None:
        while size() < count:
            await self.log._store.wait_for_arrival(1.0)
            await asyncio.sleep(0)

    def log_size(self, place: Place) -> int:
        entries = self.log._store.partition(Place(f"r.{place.topic}", place.partition)).entries
        return sum(entry.record is not None for entry in entries)
