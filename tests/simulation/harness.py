"""Kills a transform task at seeded random points and compares what it published.

A case is a core and a script of input records. Each record is written after the previous one was
handled, so that the order across topics is the same in every run, and two runs differ only in
where they crash.
"""

import asyncio
import io
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from forgemq_bus.log import READ_BYTES_MAX, Emit, Log, Place, Reader, Record
from forgemq_bus.memory import MemoryLog, MemoryTransactionWriter
from forgemq_contracts import topics
from forgemq_contracts.messages import Core
from forgemq_shell.task import TransformTask
from forgemq_shell.task_plan import TaskPlan
from forgemq_shell.transform_settings import TransformSettings
from forgemq_telemetry import Telemetry

CrashPoint = Literal["read", "before", "middle", "after"]
CRASH_POINTS: tuple[CrashPoint, ...] = ("read", "before", "middle", "after")
DEADLINE_S = 30.0
SETTINGS = TransformSettings(batch_linger_s=0.0, snapshot_every_batches=7, snapshot_every_s=1e9)


@dataclass(frozen=True, kw_only=True)
class CoreCase:
    """One core and what happens to it.

    Attributes:
        name: Name of the service.
        make_core: Makes a core without state.
        script: Input records in order; all on partitions of one task.
        topics_made: Partition counts of every topic that the script or the core writes.
    """

    name: str
    journal: topics.Topic
    make_core: Callable[[], Core]
    script: tuple[Emit, ...]
    topics_made: Mapping[str, int] = field(
        default_factory=lambda: {topic.name: 1 for topic in topics.OF_RUN}
    )
    settings: TransformSettings = SETTINGS

    @property
    def inputs(self) -> tuple[Place, ...]:
        """Every partition that the script writes to."""
        return tuple(sorted({emit.place for emit in self.script}))

    def plan(self) -> TaskPlan:
        """The only task of the case."""
        return TaskPlan(
            service=self.name,
            journal=Place(self.journal.name, 0),
            inputs=self.inputs,
            tick_s=0.0,
            logic_version=1,
            settings=self.settings,
        )


class CrashError(Exception):
    """The process dies here."""


class Crashes:
    """Decides from a seed where the process dies."""

    def __init__(self, seed: int, *, probability: float) -> None:
        self._random = random.Random(seed)
        self._probability = probability
        self.counts: dict[CrashPoint, int] = dict.fromkeys(CRASH_POINTS, 0)

    def is_due(self, point: CrashPoint) -> bool:
        """Whether the process dies at this point, this time."""
        if self._random.random() >= self._probability:
            return False
        self.counts[point] += 1
        return True


class CrashingLog:
    """The log of a process that dies while it reads or commits; the stored records survive."""

    def __init__(self, log: MemoryLog, crashes: Crashes, *, progress: asyncio.Event) -> None:
        self._log = log
        self._crashes = crashes
        self._progress = progress
        self.committed = log.committed
        self.first_positions = log.first_positions
        self.end_positions = log.end_positions
        self.trim = log.trim
        self.values = log.values

    async def reader(
        self, positions: Mapping[Place, int], *, has_values: bool = True
    ) -> "CrashingReader":
        reader = await self._log.reader(positions, has_values=has_values)
        return CrashingReader(reader, self._crashes)

    async def transaction_writer(self, transactional_id: str) -> "CrashingWriter":
        writer = await self._log.transaction_writer(transactional_id)
        return CrashingWriter(writer, self._crashes, progress=self._progress)


class CrashingReader:
    """Dies after it read records and before they were handled."""

    def __init__(self, reader: Reader, crashes: Crashes) -> None:
        self._reader = reader
        self._crashes = crashes
        self.position = reader.position
        self.pause = reader.pause
        self.resume = reader.resume
        self.close = reader.close

    async def read(
        self, *, timeout_s: float, records_max: int, bytes_max: int = READ_BYTES_MAX
    ) -> list[Record]:
        records = await self._reader.read(
            timeout_s=timeout_s, records_max=records_max, bytes_max=bytes_max
        )
        if records and self._crashes.is_due("read"):
            raise CrashError
        return records


class CrashingWriter:
    """Dies before a transaction, in the middle of it, or after it and before it is reported."""

    def __init__(
        self, writer: MemoryTransactionWriter, crashes: Crashes, *, progress: asyncio.Event
    ) -> None:
        self._writer = writer
        self._crashes = crashes
        self._progress = progress
        self.close = writer.close

    async def commit(
        self, *, outputs: Sequence[Emit], group: str, positions: Mapping[Place, int]
    ) -> None:
        if self._crashes.is_due("before"):
            raise CrashError
        if self._crashes.is_due("middle"):
            await self._writer.abandon(outputs=outputs)
            raise CrashError
        await self._writer.commit(outputs=outputs, group=group, positions=positions)
        self._progress.set()
        if self._crashes.is_due("after"):
            raise CrashError


async def published(case: CoreCase, crashes: Crashes) -> dict[Place, list[tuple[bytes, bytes]]]:
    """Key and value of everything the case wrote, by partition, in order; without journals."""
    log = MemoryLog(run="sim")
    await log.create_topics(
        {**case.topics_made, **{f"{place.topic}-dlq": 1 for place in case.inputs}}
    )
    async with asyncio.timeout(DEADLINE_S):
        async with asyncio.TaskGroup() as group:
            stop, progress = asyncio.Event(), asyncio.Event()
            running = group.create_task(
                _restarted_until_stopped(case, log, crashes, stop=stop, progress=progress)
            )
            await _write_script(case, log, progress)
            # Everything is committed; the process only waits for records that do not come.
            stop.set()
            running.cancel()
    written = await records_of(log, _output_places(case))
    await log.close()
    return written


async def _restarted_until_stopped(
    case: CoreCase,
    log: MemoryLog,
    crashes: Crashes,
    *,
    stop: asyncio.Event,
    progress: asyncio.Event,
) -> None:
    while not stop.is_set():
        process = log.open()
        task = TransformTask(
            case.plan(),
            log=CrashingLog(process, crashes, progress=progress),
            core=case.make_core(),
            telemetry=Telemetry(service=case.name, stream=io.StringIO()),
            stop=stop,
        )
        try:
            await task.run()
        except CrashError:
            await process.close()


async def _write_script(case: CoreCase, log: MemoryLog, progress: asyncio.Event) -> None:
    writer = await log.writer()
    group = case.plan().positions_group
    for emit in case.script:
        offset = await writer.write(emit)
        while (await log.committed(group=group, places=[emit.place])).get(emit.place, 0) <= offset:
            progress.clear()
            await progress.wait()


def _output_places(case: CoreCase) -> list[Place]:
    written = {**case.topics_made, **{f"{place.topic}-dlq": 1 for place in case.inputs}}
    return sorted(
        Place(topic, number)
        for topic, count in written.items()
        for number in range(count)
        if topic != case.journal.name and Place(topic, number) not in case.inputs
    )


async def records_of(
    log: Log, places: Sequence[Place], *, timeout_s: float = 0.0
) -> dict[Place, list[tuple[bytes, bytes]]]:
    """Key and value of every committed record of these partitions."""
    first = await log.first_positions(places)
    ends = await log.end_positions(places)
    reader = await log.reader(first)
    found: dict[Place, list[tuple[bytes, bytes]]] = {place: [] for place in places}
    while any(reader.position(place) < end for place, end in ends.items()):
        for record in await reader.read(timeout_s=timeout_s, records_max=1000):
            found[record.place].append((record.key, record.value))
    await reader.close()
    return {place: records for place, records in found.items() if records}
