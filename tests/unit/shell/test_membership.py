"""Restores and members of a transform: nothing waits for a restore, nothing is read for nothing."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from forgemq_bus.log import READ_BYTES_MAX, Place, Reader, Record
from forgemq_bus.memory import MemoryLog
from forgemq_bus.payloads import reference_of
from forgemq_contracts import topics
from forgemq_shell.task import TransformTask
from forgemq_shell.transform_settings import TransformSettings
from tests.unit.shell.test_lost_snapshots import Blobs, LargeCore
from tests.unit.shell.test_transform import (
    CONFIGURATION,
    ENVIRON,
    PARTITIONS,
    Process,
    counting,
    expected,
    merged,
    running,
    score,
    until_merged,
)


class StalledReader:
    """A reader of which nothing comes."""

    def __init__(self, reader: Reader) -> None:
        self.position = reader.position
        self.seek = reader.seek
        self.pause = reader.pause
        self.resume = reader.resume
        self.close = reader.close

    async def read(
        self, *, timeout_s: float, records_max: int, bytes_max: int = READ_BYTES_MAX
    ) -> list[Record]:
        del timeout_s, records_max, bytes_max
        await asyncio.Event().wait()
        raise AssertionError("an event that nobody sets")


class StalledLog:
    """The log of a process that does not get the inputs which its journal names."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log
        self.is_restoring = asyncio.Event()
        self.committed = log.committed
        self.end_positions = log.end_positions
        self.first_positions = log.first_positions
        self.member = log.member
        self.transaction_writer = log.transaction_writer

    async def reader(self, positions: Mapping[Place, int], *, has_values: bool = True) -> Reader:
        reader = await self._log.reader(positions, has_values=has_values)
        if not any(place.topic == topics.SCORED_GROUPS.name for place in positions):
            return reader
        self.is_restoring.set()
        return StalledReader(reader)


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs(tmp_path)


@pytest.fixture
async def log(blobs: Blobs) -> AsyncIterator[MemoryLog]:
    log = MemoryLog(run="r", blobs=blobs, inline_bytes_max=1000)
    await log.create_topics({topic.name: PARTITIONS for topic in topics.OF_RUN})
    yield log
    await log.close()


async def leave_without_snapshots(log: MemoryLog, count: int) -> None:
    """Run every task until so many groups are merged, then kill them."""
    transform, process = counting(), Process(log=log.open())
    async with asyncio.TaskGroup() as group:
        dying = [
            group.create_task(
                TransformTask(
                    transform.plan(
                        number, configuration=CONFIGURATION, settings=TransformSettings()
                    ),
                    log=process.log,
                    core=transform.make_core(number),
                    telemetry=process.telemetry,
                    stop=asyncio.Event(),
                ).run()
            )
            for number in range(PARTITIONS)
        ]
        await until_merged(log, count)
        for task in dying:
            task.cancel()


async def test_a_stop_does_not_wait_for_a_restore(log: MemoryLog):
    await score(log, range(8))
    await leave_without_snapshots(log, 8)
    stalled = StalledLog(log.open())
    async with asyncio.timeout(5), running(Process(log=stalled)):
        await stalled.is_restoring.wait()
    assert await merged(log) == expected(range(8))


async def test_a_process_that_joins_does_not_wait_for_the_restore_of_another(log: MemoryLog):
    await score(log, range(8))
    await leave_without_snapshots(log, 8)
    stalled = StalledLog(log.open())
    first, second = Process(log=stalled), Process(log=log.open())
    async with asyncio.timeout(5), running(first):
        await stalled.is_restoring.wait()
        async with running(second):
            while not second.events("assigned"):
                await log._store.wait_for_arrival(0.01)
            assert second.events("assigned")[-1]["held"] == [2, 3]
            await score(log, range(8, 16))
            await until_merged(log, 12)
            first.stop.set()
            await until_merged(log, 16)
    assert await merged(log) == expected(range(16))


async def leave_trimmed_journals(log: MemoryLog) -> None:
    """Run a process with many snapshots, and trim: each journal begins with a snapshot."""
    environ = {**ENVIRON, "FORGEMQ_TRANSFORM_SNAPSHOT_EVERY_BATCHES": "1"}
    async with running(Process(log=log.open(), environ=environ), LargeCore):
        for number in range(0, 12, PARTITIONS):
            await score(log, range(number, number + PARTITIONS))
            await until_merged(log, number + PARTITIONS)
    journals = [Place(topics.MERGER_JOURNAL.name, number) for number in range(PARTITIONS)]
    begins = await log.committed(group="merger-positions", places=journals)
    assert min(begins.values()) > 0
    await log.trim(begins)


async def snapshots_in(log: MemoryLog, number: int) -> list[str]:
    """The blobs of one journal's snapshots, oldest first."""
    place = Place(topics.MERGER_JOURNAL.name, number)
    reader = await log.reader(await log.first_positions([place]), has_values=False)
    records = await reader.read(timeout_s=0, records_max=1000)
    found = [reference.sha256 for record in records if (reference := reference_of(record))]
    assert len(found) > 1
    return found


async def test_a_start_fetches_each_newest_snapshot_once_and_no_other(log: MemoryLog, blobs: Blobs):
    await leave_trimmed_journals(log)
    before = blobs.got
    async with running(Process(log=log.open()), LargeCore):
        await score(log, range(12, 16))
        await until_merged(log, 16)
    assert blobs.got - before == PARTITIONS


async def test_a_lost_older_snapshot_is_not_even_noticed(log: MemoryLog, blobs: Blobs):
    await leave_trimmed_journals(log)
    for number in range(PARTITIONS):
        blobs.lost.update((await snapshots_in(log, number))[:-1])
    process = Process(log=log.open())
    async with running(process, LargeCore):
        await score(log, range(12, 16))
        await until_merged(log, 16)
    assert process.events("snapshot_lost") == []
    assert await merged(log) == expected(range(16))
