"""The trainer as a service on a given log, and the records that it wrote."""

import asyncio
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forgemq_bus.blobs import BlobStore
from forgemq_bus.log import Emit, Log, Place
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.run import RunConfiguration, StartedRun
from forgemq_contracts.steps import ScheduledStep, TrainedStep
from forgemq_contracts.trees import MergedTree
from forgemq_contracts.weights import PublishedWeights, ReportedEngine
from forgemq_shell.service import Context
from forgemq_telemetry.telemetry import Telemetry
from forgemq_trainer.app import CONSUMES, PRODUCES, main
from tests.small_run import small_run
from tests.unit.trainer.scene import configuration_of, save_base, scheduled_step

POLL_S = 0.01
"""Between two reads of the log; in unit tests the clock jumps over it."""


@dataclass(frozen=True)
class Bench:
    """One run on one log; each call of `train` is one life of the trainer."""

    log: Log
    open_log: Callable[[], Log]
    configuration: RunConfiguration
    folder: Path
    telemetry: Telemetry = field(
        default_factory=lambda: Telemetry(service="trainer", stream=io.StringIO())
    )
    remote: str = ""
    has_blob_folder: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def blobs(self) -> str:
        """The run's blob store."""
        return self.remote or str(self.folder.parent / "blobs")

    async def train(self, *, until: int, lineage: int = 0) -> None:
        """Start a trainer; stop it once step `until` is trained and its weights are published.

        Only records of this lineage or newer ones count, so that a restart is waited for.
        """
        stop = asyncio.Event()
        context = Context(
            started=StartedRun(
                run="r", configuration=self.configuration, blobs=self.blobs, started_ms=0
            ),
            log=self.open_log(),
            blobs=BlobStore(self.blobs, run="r", has_folder=self.has_blob_folder),
            telemetry=self.telemetry,
            stop=stop,
            environ={"FORGEMQ_TRAINER_FOLDER": str(self.folder), **self.environ},
        )
        async with asyncio.TaskGroup() as group:
            trainer = group.create_task(main(context))
            while not trainer.done():
                steps = [step.step for step in await self.trained() if step.lineage >= lineage]
                published = [w.version for w in await self.published() if w.lineage >= lineage]
                if until in steps and until + 1 in published:
                    stop.set()
                await asyncio.sleep(POLL_S)

    async def trained(self) -> list[TrainedStep]:
        """Read all records of trained-steps."""
        records = await self._all(topics.TRAINED_STEPS)
        return [record for record in records if isinstance(record, TrainedStep)]

    async def published(self) -> list[PublishedWeights]:
        """Read all records of published-weights."""
        records = await self._all(topics.PUBLISHED_WEIGHTS)
        return [record for record in records if isinstance(record, PublishedWeights)]

    async def wait_for_start(self) -> None:
        """Wait until a trainer has published."""
        reader = await self.log.reader({Place(topics.PUBLISHED_WEIGHTS.name, 0): 0})
        assert await reader.read(timeout_s=20, records_max=1)
        await reader.close()

    async def put_trees(self, trees: Sequence[MergedTree]) -> None:
        """Commit trees as the merger does."""
        writer = await self.log.transaction_writer("merger")
        groups = scheduled_step(0, trees).groups
        await writer.commit(
            outputs=[
                Emit(
                    topic=topics.MERGED_TREES.name,
                    partition=group.partition,
                    key=tree.group_id.encode(),
                    value=topics.encode(tree),
                )
                for tree, group in zip(trees, groups, strict=True)
            ],
            group="merger",
            positions={},
        )

    async def put_steps(self, steps: Sequence[ScheduledStep]) -> None:
        """Commit steps as the scheduler does."""
        writer = await self.log.transaction_writer("scheduler")
        await writer.commit(
            outputs=[
                Emit(
                    topic=topics.SCHEDULED_STEPS.name,
                    partition=0,
                    key=str(step.step).encode(),
                    value=topics.encode(step),
                )
                for step in steps
            ],
            group="scheduler",
            positions={},
        )

    async def write(self, topic: topics.Topic, record: PublishedWeights | ReportedEngine) -> None:
        """Write one record outside transactions."""
        writer = await self.log.writer()
        await writer.write(
            Emit(topic=topic.name, partition=0, key=b"", value=topics.encode(record))
        )

    async def _all(self, topic: topics.Topic) -> list[object]:
        place = Place(topic.name, 0)
        end = (await self.log.end_positions([place]))[place]
        reader = await self.log.reader({place: 0})
        values: list[object] = []
        while reader.position(place) < end:
            records = await reader.read(timeout_s=1, records_max=1000)
            values += [topics.decode(topic, record.value) for record in records]
        await reader.close()
        return values


async def create_topics(log: Log) -> None:
    """Create all topics that the trainer reads or writes."""
    counts = {
        topic.name: topics.partition_count(topic, small_run(group_partitions=2))
        for topic in {*CONSUMES, *PRODUCES}
    }
    dlq = {topic.dlq_name: 1 for topic in CONSUMES}
    await log.create_topics(counts | dlq)


async def memory_bench(folder: Path, **trainer: object) -> Bench:
    """A bench with a new log in memory; benches of one folder share its model and checkpoints."""
    log = MemoryLog(run="r")
    await create_topics(log)
    base = folder / "base"
    if not base.exists():
        save_base(base)
    return Bench(log, log.open, configuration_of(base, **trainer), folder / "trainer")
