import asyncio
import json

import msgspec
import pytest

from forgemq_bus.errors import FencedError
from forgemq_bus.log import Emit, Place, Record
from forgemq_contracts import topics
from forgemq_contracts.groups import ScoredGroup
from forgemq_contracts.journal import JournalInput, JournalledBatch
from forgemq_shell.bad_record_limit import TooManyBadRecordsError
from forgemq_shell.batch import digest
from forgemq_shell.journal import JournalError
from forgemq_shell.replay import replay_task
from forgemq_shell.restore import DivergedError
from tests.simulation.counting_core import CountingCore
from tests.simulation.harness import records_of
from tests.unit.shell.task_world import JOURNAL, MERGED, QUIET, SCORED, TRACE, World


async def test_a_batch_is_one_transaction_of_outputs_journal_and_positions(world: World):
    await world.score("g-1", "g-2", "g-1")
    async with world.task(is_killed=True):
        await world.until_merged(3)
    assert await world.merged() == [("g-1", 1), ("g-2", 2), ("g-1", 3)]
    (batch,) = await world.journal()
    emits = [
        Emit(topic=MERGED.topic, partition=0, key=key, value=value)
        for key, value in (await records_of(world.log, [MERGED]))[MERGED]
    ]
    assert batch == JournalledBatch(
        sequence=0,
        inputs=(JournalInput(topic=SCORED.topic, offset=0, count=3),),
        outputs=3,
        outputs_digest=digest(emits),
    )
    assert await world.log.committed(group="merger-positions", places=[SCORED]) == {SCORED: 3}


async def test_the_trace_of_an_input_goes_on_with_its_outputs(world: World):
    await world.score("g-1")
    async with world.task():
        await world.until_merged(1)
    reader = await world.log.reader({MERGED: 0})
    (record,) = await reader.read(timeout_s=1, records_max=10)
    assert record.headers == (TRACE, ("batch", b"merger-0/0"))


async def test_a_task_holds_at_most_so_many_records_at_once(world: World):
    settings = msgspec.structs.replace(QUIET, batch_records_max=7, read_records_max=3)
    await world.score(*(f"g-{n}" for n in range(40)))
    async with world.task(settings):
        await world.until_merged(40)
    sizes = [item.count for batch in await world.journal() for item in batch.inputs]
    assert max(sizes) <= 7
    assert sum(sizes) == 40


async def test_idle_ticks_write_no_transaction_until_there_are_too_many(world: World):
    settings = msgspec.structs.replace(QUIET, ticks_pending_max=5)
    async with world.task(settings, tick_s=1.0, is_killed=True):
        for _ in range(4):
            world.clock.now_s += 1.0
            await asyncio.sleep(0.3)
        assert await world.journal() == []
        world.clock.now_s += 1.0
        await world.until(lambda: world.log_size(JOURNAL), 1)
    (batch,) = await world.journal()
    assert [item.tick_ms for item in batch.inputs] == [0, 1000, 2000, 3000, 4000]
    assert batch.outputs == 0


async def test_a_tick_that_writes_is_committed_at_once_with_those_before_it(world: World):
    async with world.task(core=CountingCore(tick_outputs_ms=2000), tick_s=1.0, is_killed=True):
        for _ in range(3):
            await asyncio.sleep(0.3)
            world.clock.now_s += 1.0
        await world.until_merged(1)
    (batch,) = await world.journal()
    assert [item.tick_ms for item in batch.inputs] == [0, 1000, 2000]
    assert await world.merged() == [("tick", 1)]


async def test_run_time_stands_still_while_the_task_is_down(world: World):
    await world.score("g-1")
    async with world.task(tick_s=1.0):
        await world.until_merged(1)
        world.clock.now_s += 5.0
        await world.score("g-2")
        await world.until_merged(2)
    world.clock.now_s += 86_400.0
    async with world.task(tick_s=1.0):
        await world.score("g-3")
        await world.until_merged(3)
        world.clock.now_s += 2.0
        await world.score("g-4")
        await world.until_merged(4)
    ticks = [item.tick_ms for b in await world.journal() for item in b.inputs if not item.topic]
    assert ticks == sorted(ticks)
    assert ticks[-1] == 7000


async def test_the_journal_and_inputs_are_kept_from_the_snapshot_before_the_newest_on(
    world: World,
):
    settings = msgspec.structs.replace(QUIET, snapshot_every_batches=3)
    async with world.task(settings, is_killed=True):
        for number in range(3):
            await world.score(f"g-{number}")
            await world.until_merged(number + 1)
        await world.until(lambda: world.log_size(JOURNAL), 4)
        assert await world.log.committed(group="merger-needed", places=[SCORED]) == {}
        for number in range(3, 7):
            await world.score(f"g-{number}")
            await world.until_merged(number + 1)
    assert await world.log.committed(group="merger-needed", places=[SCORED]) == {SCORED: 3}
    await world.log.trim({SCORED: 3})
    await world.log.trim(await world.log.committed(group="merger-positions", places=[JOURNAL]))
    kept = await world.journal()
    assert [(batch.sequence, batch.snapshot is not None) for batch in kept] == [
        (3, True),
        (4, False),
        (5, False),
        (6, False),
        (7, True),
        (8, False),
    ]
    assert [len(batch.inputs) for batch in kept] == [0, 1, 1, 1, 0, 1]
    async with world.task(settings):
        await world.score("g-0")
        await world.until_merged(8)
    assert (await world.merged())[-1] == ("g-0", 8)


async def test_a_clean_stop_leaves_nothing_behind_its_snapshot(world: World):
    async with world.task(tick_s=1.0):
        await world.score("g-1")
        await world.until_merged(1)
        world.clock.now_s += 1.0
        await asyncio.sleep(0.3)
    first, ticks, snapshot = await world.journal()
    assert [item.topic for item in first.inputs] == ["", SCORED.topic]
    assert [item.tick_ms for item in ticks.inputs] == [1000]
    assert (snapshot.inputs, snapshot.run_ms) == ((), 1000)
    async with world.task(tick_s=1.0):
        await asyncio.sleep(0)
    assert len(await world.journal()) == 3


async def test_a_journal_that_is_kept_replays_from_its_first_batch_over_its_snapshots(world: World):
    settings = msgspec.structs.replace(QUIET, snapshot_every_batches=2)
    async with world.task(settings):
        for number in range(6):
            await world.score(f"g-{number}")
            await world.until_merged(number + 1)
    assert [batch.sequence for batch in await world.journal()] == list(range(9))
    replayed = [
        item
        async for item in replay_task(
            world.log, JOURNAL, CountingCore(), service="merger", logic_version=1
        )
    ]
    assert [item.is_same for item in replayed] == [True] * 9
    assert [item.snapshot is not None for item in replayed] == [False, False, True] * 3


async def test_a_replay_finds_the_batch_where_bytes_differ(world: World):
    async with world.task(is_killed=True):
        for number in range(3):
            await world.score(f"g-{number}")
            await world.until_merged(number + 1)
    place = Place(f"r.{SCORED.topic}", 0)
    entry = world.log._store.partitions[place].entries[1]
    record = ScoredGroup(group_id="g-9", domain="d", purpose="train", episodes=())
    tampered = Record(
        topic=SCORED.topic,
        partition=0,
        offset=1,
        timestamp_ms=entry.record.timestamp_ms,
        key=b"g-1",
        value=topics.encode(record),
    )
    world.log._store.partitions[place].entries[1] = type(entry)(tampered, None)
    replayed = [
        item
        async for item in replay_task(
            world.log, JOURNAL, CountingCore(), service="merger", logic_version=1
        )
    ]
    assert [item.is_same for item in replayed] == [True, False, True]
    with pytest.raises(ExceptionGroup) as died:
        async with world.task():
            await asyncio.sleep(5)
    assert died.group_contains(DivergedError, match="merger-0: batch 1 wrote 1 records")


async def test_a_core_that_is_not_the_one_of_the_journal_is_refused(world: World):
    async with world.task(is_killed=True):
        await world.score("g-1")
        await world.until_merged(1)
    with pytest.raises(ExceptionGroup) as died:
        async with world.task(core=CountingCore(partition=1)):
            await asyncio.sleep(5)
    assert died.group_contains(DivergedError, match="batch 0 wrote 1 records")


async def test_an_input_that_was_trimmed_too_early_is_named(world: World):
    async with world.task(is_killed=True):
        await world.score("g-1", "g-2")
        await world.until_merged(2)
    await world.log.trim({SCORED: 1})
    with pytest.raises(ExceptionGroup) as died:
        async with world.task():
            await asyncio.sleep(5)
    assert died.group_contains(
        JournalError, match="record 0 is needed but the oldest one kept is 1"
    )


async def test_a_journal_without_its_beginning_is_refused(world: World):
    async with world.task(is_killed=True):
        for number in range(2):
            await world.score(f"g-{number}")
            await world.until_merged(number + 1)
    writer = await world.log.transaction_writer("by-hand")
    await writer.commit(outputs=(), group="merger-positions", positions={JOURNAL: 2})
    with pytest.raises(ExceptionGroup) as died:
        async with world.task():
            await asyncio.sleep(5)
    assert died.group_contains(JournalError, match="starts with batch 1 and has no snapshot")


async def test_positions_that_do_not_match_the_journal_are_refused(world: World):
    async with world.task():
        await world.score("g-1", "g-2")
        await world.until_merged(2)
    writer = await world.log.transaction_writer("by-hand")
    await writer.commit(outputs=(), group="merger-positions", positions={SCORED: 1})
    with pytest.raises(ExceptionGroup) as died:
        async with world.task():
            await asyncio.sleep(5)
    assert died.group_contains(JournalError, match="up to 2, committed is 1")


async def test_a_flood_of_bad_records_stops_the_task_and_publishes_none_of_them(world: World):
    settings = msgspec.structs.replace(QUIET, bad_consecutive_max=4)
    bad = Emit(topic=SCORED.topic, partition=0, key=b"g-1", value=b"\xc1")
    await world.write([bad] * 5)
    with pytest.raises(ExceptionGroup) as died:
        async with world.task(settings):
            await asyncio.sleep(5)
    assert died.group_contains(TooManyBadRecordsError)
    assert await records_of(world.log, [Place(f"{SCORED.topic}-dlq", 0)]) == {}


async def test_a_few_bad_records_pass_and_are_reported_one_line_each(world: World):
    bad = Emit(topic=SCORED.topic, partition=0, key=b"g-1", value=b"\xc1")
    await world.write([bad])
    await world.score("g-1")
    async with world.task():
        await world.until_merged(1)
    dead = await records_of(world.log, [Place(f"{SCORED.topic}-dlq", 0)])
    assert list(dead.values()) == [[(b"g-1", b"\xc1")]]
    (line,) = [json.loads(line) for line in world.lines.getvalue().splitlines()]
    assert (line["event"], line["topic"], line["offset"]) == ("bad_record", SCORED.topic, 0)


async def fence_a_running_task(world: World) -> None:
    async with world.task():
        await world.score("g-1")
        await world.until_merged(1)
        await world.log.transaction_writer("merger-0")
        await world.score("g-2")
        await asyncio.sleep(5)


async def test_a_task_that_was_fenced_publishes_nothing_more(world: World):
    with pytest.raises(ExceptionGroup) as died:
        await fence_a_running_task(world)
    assert died.group_contains(FencedError)
    assert await world.merged() == [("g-1", 1)]
