"""A merger whose snapshots name records: what it needs stays on the log, and comes back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from forgemq_auditor.core import trim_positions
from forgemq_bus.log import Place
from forgemq_contracts import topics
from forgemq_contracts.messages import Output
from forgemq_merger.core.merger import MergerCore
from forgemq_shell.comparison import compare
from forgemq_shell.journal import SNAPSHOT_HEADER, JournalError
from forgemq_shell.recorded_log import RecordedLog
from forgemq_shell.recording import record_task
from forgemq_shell.records import emit_of
from forgemq_shell.task import TransformTask
from forgemq_shell.task_plan import TaskPlan
from forgemq_telemetry import Telemetry
from tests.lost_values import LosingStore, blob_of, log_with
from tests.simulation.cases import EPISODES, TURNS, finished_completion, retired, scored_group
from tests.unit.shell.task_world import JOURNAL, MERGED, QUIET
from tests.unit.shell.test_comparison import CONFIGURATION

COMPLETIONS = Place(topics.FINISHED_COMPLETIONS.name, 0)
SCORED = Place(topics.SCORED_GROUPS.name, 0)
RETIRED = Place(topics.RETIRED_GROUPS.name, 0)
TREES = Place(topics.MERGED_TREES.name, 0)
DEAD = Place(topics.FINISHED_COMPLETIONS.dlq_name, 0)
SNAPSHOTS = msgspec.structs.replace(QUIET, snapshot_every_batches=1)
PER_GROUP = EPISODES * TURNS
PLAN = TaskPlan(
    service="merger",
    journal=JOURNAL,
    inputs=(SCORED, COMPLETIONS, RETIRED),
    tick_s=0.0,
    logic_version=1,
    settings=SNAPSHOTS,
)


class Bench:
    """A merger's task on a log with files, and what other services write."""

    def __init__(self, folder: Path) -> None:
        self.store = LosingStore(folder)
        self.log = log_with(self.store)
        self.offsets: dict[tuple[int, int, int], int] = {}

    async def open(self) -> None:
        places = (COMPLETIONS, SCORED, RETIRED, TREES, MERGED, JOURNAL, DEAD)
        await self.log.create_topics({place.topic: 1 for place in places})
        self._writer = await self.log.writer()

    @asynccontextmanager
    async def task(self) -> AsyncIterator[None]:
        """Run the task; in the end it is killed."""
        task = TransformTask(
            PLAN,
            log=self.log.open(),
            core=MergerCore(0),
            telemetry=Telemetry(service="merger"),
            stop=asyncio.Event(),
        )
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            running = group.create_task(task.run())
            yield
            running.cancel()

    async def write(self, topic: topics.Topic, record: msgspec.Struct) -> int:
        output = Output(topic=topic.name, partition=0, record=record)
        return await self._writer.write(emit_of(output))

    async def complete(self, group: int) -> None:
        for index in range(EPISODES):
            for turn in range(TURNS):
                record = finished_completion(group, index, turn)
                key = (group, index, turn)
                self.offsets[key] = await self.write(topics.FINISHED_COMPLETIONS, record)

    async def score(self, group: int) -> None:
        await self.write(topics.SCORED_GROUPS, scored_group(group, self.offsets))

    async def until_read(self, place: Place) -> None:
        """Wait until the task has committed all of this partition."""
        end = (await self.log.end_positions([place]))[place]
        group = PLAN.positions_group
        while (await self.log.committed(group=group, places=[place])).get(place) != end:
            await self.log._store.wait_for_arrival(0.01)

    async def until_snapshot(self) -> None:
        """Wait until the newest record of the journal is a snapshot."""
        while True:
            end = (await self.log.end_positions([JOURNAL]))[JOURNAL]
            start = (await self.log.first_positions([JOURNAL]))[JOURNAL]
            reader = await self.log.reader({JOURNAL: start}, has_values=False)
            records = await reader.read(timeout_s=0, records_max=end + 1)
            await reader.close()
            if records and SNAPSHOT_HEADER in dict(records[-1].headers):
                return
            await self.log._store.wait_for_arrival(0.01)

    async def until_letter(self) -> None:
        """Wait until a dead letter is written."""
        while not (await self.log.end_positions([DEAD]))[DEAD]:
            await self.log._store.wait_for_arrival(0.01)

    async def until_needed(self, offset: int) -> None:
        """Wait until records from this offset on are needed."""
        while await self.needed() != offset:
            await self.log._store.wait_for_arrival(0.01)

    async def needed(self) -> int:
        """Offset of the oldest record that a restart needs; -1: none was given up yet."""
        known = await self.log.committed(group="merger-needed", places=[COMPLETIONS])
        return known.get(COMPLETIONS, -1)

    async def trim(self) -> None:
        """Delete what the task says that nobody needs, as the auditor does."""
        if await self.needed() < 0:
            return
        kept = {COMPLETIONS: topics.FINISHED_COMPLETIONS}
        needed = {g: {COMPLETIONS: await self.needed()} for g in kept[COMPLETIONS].needed_by}
        first = await self.log.first_positions([COMPLETIONS])
        await self.log.trim(trim_positions(kept, needed=needed, first=first, ends={}))
        await self.log.trim(await self.log.committed(group="merger-positions", places=[JOURNAL]))

    async def trees(self) -> list[bytes]:
        reader = await self.log.reader({TREES: 0})
        return [record.value for record in await reader.read(timeout_s=0, records_max=100)]


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    await bench.open()
    yield bench
    await bench.log.close()


async def merged_in_one_life(folder: Path, groups: tuple[int, ...]) -> list[bytes]:
    other = Bench(folder)
    await other.open()
    for group in range(4):
        await other.complete(group)
    async with other.task():
        for group in groups:
            await other.score(group)
        await other.until_read(SCORED)
        await other.until_read(COMPLETIONS)
    return await other.trees()


async def test_killed_trimmed_and_restored_it_writes_the_same_trees(bench: Bench, tmp_path: Path):
    for group in range(4):
        async with bench.task():
            await bench.complete(group)
            await bench.until_read(COMPLETIONS)
            await bench.until_snapshot()
        await bench.trim()
    for group in (2, 0, 3):
        async with bench.task():
            await bench.score(group)
            await bench.until_read(SCORED)
            await bench.until_snapshot()
        await bench.trim()
    expected = await merged_in_one_life(tmp_path / "undisturbed", (2, 0, 3))
    assert len(expected) == 3
    assert await bench.trees() == expected


async def test_what_an_open_group_needs_is_kept_and_the_rest_is_not(bench: Bench):
    async with bench.task():
        for group in range(4):
            await bench.complete(group)
            await bench.until_read(COMPLETIONS)
        for group in (0, 2):
            await bench.score(group)
            await bench.until_read(SCORED)
        # Of two kept snapshots the older one counts: two further batches make it a new one.
        for group in (7, 9, 11):
            await bench.write(topics.RETIRED_GROUPS, retired(group))
            await bench.until_read(RETIRED)
            await bench.until_snapshot()
        await bench.until_needed(PER_GROUP)
    async with bench.task():
        await bench.write(topics.RETIRED_GROUPS, retired(1))
        await bench.until_read(RETIRED)
        for group in (5, 6, 8):
            await bench.write(topics.RETIRED_GROUPS, retired(group))
            await bench.until_read(RETIRED)
            await bench.until_snapshot()
        await bench.until_needed(3 * PER_GROUP)


async def test_a_value_lost_behind_a_snapshot_fails_its_group_with_one_dead_letter(bench: Bench):
    async with bench.task():
        for group in range(2):
            await bench.complete(group)
        await bench.until_read(COMPLETIONS)
        await bench.until_snapshot()
    bench.store.lose(await blob_of(bench.log, COMPLETIONS, bench.offsets[1, 0, 0]))
    for _ in range(3):
        async with bench.task():
            await bench.until_read(COMPLETIONS)
            await bench.until_letter()
    async with bench.task():
        for group in (0, 1):
            await bench.score(group)
        await bench.until_read(SCORED)
    assert len(await bench.trees()) == 1
    reader = await bench.log.reader({DEAD: 0})
    [letter] = await reader.read(timeout_s=0, records_max=9)
    assert dict(letter.headers)["group"] == b"g-1"


async def test_a_record_that_a_snapshot_names_and_that_is_gone_ends_the_task(bench: Bench):
    async with bench.task():
        await bench.complete(0)
        await bench.until_read(COMPLETIONS)
        await bench.until_snapshot()
    await bench.log.trim({COMPLETIONS: 1})
    with pytest.raises(ExceptionGroup) as died:
        async with bench.task():
            await asyncio.sleep(5)
    assert died.group_contains(
        JournalError, match="record 0 is needed but the oldest one kept is 1"
    )


async def test_a_replay_begins_with_a_snapshot_whose_records_are_kept(bench: Bench):
    async with bench.task():
        for group in range(3):
            await bench.complete(group)
            await bench.until_read(COMPLETIONS)
            await bench.score(group)
            await bench.until_read(SCORED)
            await bench.until_snapshot()
    await bench.trim()
    compared = await compare(bench.log, PLAN, MergerCore(0), outputs=[TREES, MERGED])
    assert compared.difference is None
    assert compared.batches > 0


async def test_a_recording_has_what_a_snapshot_names_though_no_batch_behind_it_reads_any(
    bench: Bench,
):
    async with bench.task():
        await bench.complete(0)
        await bench.until_read(COMPLETIONS)
        await bench.until_snapshot()
        for group in (7, 9, 11):
            await bench.write(topics.RETIRED_GROUPS, retired(group))
            await bench.until_read(RETIRED)
            await bench.until_snapshot()
        await bench.until_needed(0)
    await bench.trim()
    recording = await record_task(
        bench.log, PLAN, configuration=CONFIGURATION, outputs=[TREES, MERGED]
    )
    recorded = {part.topic: len(part.records) for part in recording.partitions}
    assert recorded[COMPLETIONS.topic] == PER_GROUP
    compared = await compare(RecordedLog(recording), PLAN, MergerCore(0), outputs=[TREES, MERGED])
    assert (compared.difference, compared.batches > 0) == (None, True)
