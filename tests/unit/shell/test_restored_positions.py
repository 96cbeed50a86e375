"""Journal and committed positions agree exactly, or one of them is whole and the other is gone."""

import asyncio

import msgspec
import pytest

from forgemq_bus.log import Place
from forgemq_contracts.journal import JournalInput, JournalledBatch, JournalPosition
from forgemq_shell.journal import JournalError
from forgemq_shell.restored_positions import restored_positions
from tests.unit.shell.task_world import JOURNAL, QUIET, SCORED, World

A, B = Place("a", 0), Place("b", 1)
FIRST = {A: 0, B: 4}
SNAPSHOTS = msgspec.structs.replace(QUIET, snapshot_every_batches=3)


def batch(sequence: int, *ranges: tuple[Place, int, int], **snapshot: object) -> JournalledBatch:
    inputs = tuple(
        JournalInput(topic=place.topic, partition=place.partition, offset=offset, count=count)
        for place, offset, count in ranges
    )
    return JournalledBatch(
        sequence=sequence, inputs=inputs, outputs=0, outputs_digest="", **snapshot
    )


def snapshot_of(positions: dict[Place, int]) -> dict[str, object]:
    return {
        "snapshot": b"",
        "positions": tuple(
            JournalPosition(topic=place.topic, partition=place.partition, position=position)
            for place, position in positions.items()
        ),
    }


WHOLE = [batch(0, (A, 0, 3)), batch(1, (A, 4, 2))]
BEHIND_SNAPSHOT = [batch(8, (A, 6, 1), **snapshot_of({A: 7, B: 9})), batch(9, (A, 8, 2))]
BEFORE_B_WAS = [batch(8, (A, 6, 1), **snapshot_of({A: 7})), batch(9, (A, 8, 2))]
"""As of a run that was given a partition B since."""
OLD_SNAPSHOT = [batch(8, (A, 6, 1), snapshot=b""), batch(9, (A, 8, 2))]


@pytest.mark.parametrize(
    ("batches", "committed", "expected"),
    [
        ([], {}, {A: 0, B: 4}),
        (WHOLE, {A: 6}, {A: 6, B: 4}),
        (WHOLE, {}, {A: 6, B: 4}),
        (BEHIND_SNAPSHOT, {A: 10, B: 9}, {A: 10, B: 9}),
        (BEHIND_SNAPSHOT, {A: 10}, {A: 10, B: 9}),
        (BEHIND_SNAPSHOT, {}, {A: 10, B: 9}),
        (BEFORE_B_WAS, {A: 10}, {A: 10, B: 4}),
        (OLD_SNAPSHOT, {A: 10, B: 9}, {A: 10, B: 9}),
    ],
)
def test_the_journal_says_where_to_read_on_with_and_without_positions(batches, committed, expected):
    assert restored_positions((A, B), batches=batches, committed=committed, first=FIRST) == expected


@pytest.mark.parametrize(
    ("batches", "committed"),
    [
        ([], {A: 6}),
        (WHOLE[:1], {A: 6}),
        (WHOLE, {A: 3}),
        (WHOLE, {A: 6, B: 5}),
        (BEHIND_SNAPSHOT, {A: 11, B: 9}),
        (BEHIND_SNAPSHOT, {A: 10, B: 10}),
        (OLD_SNAPSHOT, {A: 11, B: 9}),
    ],
)
def test_any_difference_is_refused(batches, committed):
    with pytest.raises(JournalError, match="the brokers lost records of the journal or positions"):
        restored_positions((A, B), batches=batches, committed=committed, first=FIRST)


@pytest.mark.parametrize("lost", [2, 3, 6])
async def test_a_journal_that_lost_its_newest_batches_is_refused(world: World, lost: int):
    await world.handle_new(5, settings=SNAPSHOTS)
    entries = world.log._store.partitions[Place(f"r.{JOURNAL.topic}", 0)].entries
    del entries[-2 * lost :]  # Each batch is a record and the marker of its transaction.
    with pytest.raises(ExceptionGroup) as died:
        async with world.task(SNAPSHOTS):
            await asyncio.sleep(5)
    assert died.group_contains(JournalError, match="committed is 5: the brokers lost")


@pytest.mark.parametrize("batches", [2, 3, 5])
async def test_positions_that_expired_come_from_the_journal(world: World, batches: int):
    await world.handle_new(batches, settings=SNAPSHOTS)
    world.log._store.positions.clear()
    async with world.task(SNAPSHOTS):
        await world.score("g-0")
        await world.until_merged(batches + 1)
    expected = [(f"g-{n}", n + 1) for n in range(batches)]
    assert await world.merged() == [*expected, ("g-0", batches + 1)]


async def test_a_quiet_input_is_not_read_again_after_its_position_expired(world: World):
    await world.handle_new(3, settings=SNAPSHOTS)
    await world.log.trim({SCORED: 3})
    world.log._store.positions.clear()
    (*_, newest) = await world.journal()
    assert newest.positions == (JournalPosition(topic=SCORED.topic, position=3),)
    async with world.task(SNAPSHOTS):
        await world.score("g-0")
        await world.until_merged(4)
    assert (await world.merged())[-1] == ("g-0", 4)
