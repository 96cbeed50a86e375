"""A task whose inputs lose their values: before they are handled, afterwards, or for a while."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from forgemq_bus.log import Emit, Place
from forgemq_contracts import topics
from forgemq_contracts.groups import ScoredGroup
from forgemq_shell.comparison import compare
from forgemq_shell.dead_letters import letter_of
from forgemq_shell.journal import JournalError
from tests.lost_values import LosingStore, blob_of, log_with, write_lost
from tests.simulation.counting_core import CountingCore
from tests.unit.shell.task_world import JOURNAL, MERGED, QUIET, SCORED, World

DEAD = Place(topics.SCORED_GROUPS.dlq_name, 0)


class LossyWorld(World):
    """A world whose log keeps its values in files."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.store = LosingStore(folder)
        self.log = log_with(self.store)

    async def letters(self) -> list[tuple[str, int]]:
        end = (await self.log.end_positions([DEAD]))[DEAD]
        reader = await self.log.reader({DEAD: 0})
        letters = [letter_of(r) for r in await reader.read(timeout_s=0, records_max=end + 1)]
        assert all("lost" in letter.reason for letter in letters)
        return [(letter.group, letter.offset) for letter in letters]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[LossyWorld]:
    world = LossyWorld(tmp_path)
    await world.open()
    yield world
    await world.log.close()


async def test_a_lost_value_is_one_dead_letter_that_names_the_group_and_the_next_is_handled(
    world: LossyWorld,
):
    await write_lost(
        world.log, world.store, Emit(topic=SCORED.topic, partition=0, key=b"g-1", value=b"x" * 99)
    )
    await world.score("g-2")
    for _ in range(3):
        async with world.task(is_killed=True):
            await world.until_merged(1)
    assert await world.merged() == [("g-2", 1)]
    assert await world.letters() == [("g-1", 0)]


async def test_a_value_that_is_there_again_does_not_change_what_was_journalled(world: LossyWorld):
    await world.score("g-1")
    world.store.lose_newest()
    async with world.task(is_killed=True):
        await world.until(lambda: world.log_size(DEAD), 1)
    world.store.find_again()
    await world.score("g-2")
    async with world.task(is_killed=True):
        await world.until_merged(1)
    assert await world.merged() == [("g-2", 1)]
    assert await world.letters() == [("g-1", 0)]
    plan = world.plan(QUIET, tick_s=0)
    compared = await compare(world.log, plan, CountingCore(), outputs=[MERGED, DEAD])
    assert compared.difference is None
    assert compared.inputs == 2


async def test_a_value_lost_after_it_was_handled_is_one_dead_letter_of_the_next_start(
    world: LossyWorld,
):
    await world.score("g-1")
    await world.score("g-2")
    lost = world.store.newest
    async with world.task(is_killed=True):
        await world.until_merged(2)
    world.store.lose(lost)
    for _ in range(3):
        async with world.task(is_killed=True):
            await world.until(lambda: world.log_size(DEAD), 1)
    await world.score("g-3")
    async with world.task(is_killed=True):
        await world.until_merged(3)
    assert [group for group, _ in await world.merged()] == ["g-1", "g-2", "g-3"]
    assert await world.letters() == [("g-2", 1)]


async def test_a_replay_names_the_first_input_that_is_lost(world: LossyWorld):
    await world.score("g-1")
    lost = world.store.newest
    async with world.task(is_killed=True):
        await world.until_merged(1)
    world.store.lose(lost)
    plan = world.plan(QUIET, tick_s=0)
    compared = await compare(world.log, plan, CountingCore(), outputs=[MERGED])
    assert compared.difference is not None
    assert compared.difference.detail.startswith(f"input {SCORED.topic}/0@0: the value is lost")


async def test_a_lost_record_of_the_journal_ends_the_task_and_is_named(world: LossyWorld):
    await world.score("g-1")
    async with world.task(is_killed=True):
        await world.until_merged(1)
    world.store.lose(await blob_of(world.log, JOURNAL, 0))
    with pytest.raises(ExceptionGroup) as died:
        async with world.task(is_killed=True):
            await asyncio.sleep(5)
    assert died.group_contains(
        JournalError, match=f"inputs of a batch are lost: {JOURNAL.topic}/0@0: "
    )


async def test_a_batch_ends_before_its_bytes_are_exceeded_also_with_blobs(world: LossyWorld):
    await world.score(*(f"g-{n:030}" for n in range(40)))
    value_bytes = len(
        msgspec.msgpack.encode(
            ScoredGroup(group_id=f"g-{0:030}", domain="d", purpose="train", episodes=())
        )
    )
    settings = msgspec.structs.replace(QUIET, batch_bytes_max=7 * value_bytes + 1)
    async with world.task(settings):
        await world.until_merged(40)
    counts = [sum(item.count for item in batch.inputs) for batch in await world.journal()]
    assert sum(counts) == 40
    # A batch that is not full takes at least one value, however large.
    assert max(counts) == 8
