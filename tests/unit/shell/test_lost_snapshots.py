"""A snapshot that is lost or damaged costs time: an older one is kept until the next is read."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from forgemq_bus.blobs import BlobStore
from forgemq_bus.errors import LostBlobError
from forgemq_contracts.fields import BlobReference
from forgemq_shell.journal import JournalError
from tests.simulation.counting_core import CountingCore
from tests.unit.shell.task_world import JOURNAL, QUIET, SCORED, World

SNAPSHOTS = msgspec.structs.replace(QUIET, snapshot_every_batches=2)
PADDING = bytes(range(256)) * 8


class LargeCore(CountingCore):
    """The counting core with a state that lies in the blob store."""

    def snapshot(self) -> bytes:
        return super().snapshot() + PADDING

    def restore(self, snapshot: bytes) -> None:
        super().restore(snapshot.removesuffix(PADDING))


class Blobs(BlobStore):
    """A store that can lose what it has, or be asked to lose what is put."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), run="r")
        self.put_ones: list[BlobReference] = []
        self.lost: set[str] = set()
        self.loses_next = False
        self.got = 0

    async def put(self, data: bytes) -> BlobReference:
        self.put_ones.append(await super().put(data))
        if self.loses_next:
            self.loses_next = False
            self.lose(-1)
        return self.put_ones[-1]

    async def get(self, reference: BlobReference) -> bytes:
        self.got += 1
        if reference.sha256 in self.lost:
            raise LostBlobError(f"{reference.sha256} is lost")
        return await super().get(reference)

    def lose(self, index: int) -> None:
        self.lost.add(self.put_ones[index].sha256)


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs(tmp_path)


@pytest.fixture
async def world(blobs: Blobs) -> AsyncIterator[World]:
    world = World(blobs=blobs, inline_bytes_max=1000)
    await world.open()
    yield world
    await world.log.close()


async def handle(world: World, numbers: range, *, is_killed: bool = True) -> None:
    async with world.task(SNAPSHOTS, core=LargeCore(), is_killed=is_killed):
        for number in numbers:
            await world.score("g")
            await world.until_merged(number + 1)


def expected(count: int) -> list[tuple[str, int]]:
    return [("g", number + 1) for number in range(count)]


async def trim(world: World) -> None:
    """Delete what the task says that nobody needs, as the auditor does."""
    await world.log.trim(await world.log.committed(group="merger-needed", places=[SCORED]))
    await world.log.trim(await world.log.committed(group="merger-positions", places=[JOURNAL]))


async def test_a_lost_newest_snapshot_costs_a_longer_replay(world: World, blobs: Blobs):
    await handle(world, range(7))  # Snapshots behind the groups 2, 4 and 6.
    await trim(world)
    assert len(blobs.put_ones) == 3
    blobs.lose(-1)
    await handle(world, range(7, 9))
    assert await world.merged() == expected(9)
    (event,) = world.events("snapshot_lost")
    assert (event["batch"], event["error"].startswith("merger-journal-v1/0@")) == (8, True)
    assert len(blobs.put_ones) > 3, "a new snapshot takes the place of the lost one"


async def test_a_snapshot_that_was_written_last_and_is_lost_is_no_loss(world: World, blobs: Blobs):
    await handle(world, range(3), is_killed=False)
    blobs.lose(-1)
    await handle(world, range(3, 4))
    assert await world.merged() == expected(4)


async def test_what_an_older_snapshot_needs_is_kept_until_a_newer_one_was_read(
    world: World, blobs: Blobs
):
    async with world.task(SNAPSHOTS, core=LargeCore(), is_killed=True):
        for number in range(7):
            if number == 5:
                blobs.loses_next = True
            await world.score("g")
            await world.until_merged(number + 1)
    assert [event["batch"] for event in world.events("snapshot_lost")] == [8]
    assert await world.log.committed(group="merger-needed", places=[SCORED]) == {SCORED: 2}
    await trim(world)
    await handle(world, range(7, 8))
    assert await world.merged() == expected(8)


async def test_without_any_snapshot_the_task_is_refused_by_name(world: World, blobs: Blobs):
    await handle(world, range(7))
    await trim(world)
    for index in range(3):
        blobs.lose(index)
    with pytest.raises(ExceptionGroup) as died:
        async with world.task(SNAPSHOTS, core=LargeCore()):
            await asyncio.sleep(5)
    assert died.group_contains(
        JournalError, match="merger-journal-v1/0: 2 snapshots of the journal are lost, and no other"
    )


async def test_a_restart_fetches_one_snapshot(world: World, blobs: Blobs):
    await handle(world, range(7))
    before = blobs.got
    async with world.task(core=LargeCore(), is_killed=True):
        await world.score("g")
        await world.until_merged(8)
    assert blobs.got - before == 1
