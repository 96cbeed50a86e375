"""A new build of a core goes on with an older one's journal; no output is lost or double."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from forgemq_contracts import topics
from forgemq_contracts.messages import Core, Event, Output
from forgemq_shell.comparison import compare
from forgemq_shell.journal import JournalError
from forgemq_shell.replay_command import replay_transform
from forgemq_shell.restore import DivergedError, NewerLogicError
from forgemq_shell.transform import Transform
from tests.simulation.counting_core import CountingCore
from tests.unit.shell.task_world import MERGED, QUIET, SCORED, World
from tests.unit.shell.test_comparison import CONFIGURATION

SNAPSHOTS = msgspec.structs.replace(QUIET, snapshot_every_batches=3)


class NewCore:
    """The counting core's next version: writes each record twice, with 100 more tokens."""

    def __init__(self) -> None:
        self._core = CountingCore()
        self.snapshot = self._core.snapshot
        self.restore = self._core.restore

    def handle(self, event: Event) -> Sequence[Output]:
        return [
            msgspec.structs.replace(
                output,
                record=msgspec.structs.replace(
                    output.record, loss_tokens=output.record.loss_tokens + 100
                ),
            )
            for output in self._core.handle(event)
            for _ in range(2)
        ]


async def handle(
    world: World, groups: Sequence[str], *, core: Core | None = None, **options: object
) -> None:
    """Run a task until each group is handled, one group a batch."""
    outputs = 1 if core is None else 2
    async with world.task(core=core, **options):
        for group_id in groups:
            written = world.log_size(MERGED)
            await world.score(group_id)
            await world.until_merged(written + outputs)


OLD = [("a", 1), ("b", 2), ("c", 3), ("d", 4)]


async def test_a_new_build_goes_on_behind_the_clean_stop_of_the_old_one(world: World):
    await handle(world, "abcd")
    await handle(world, "e", core=NewCore(), logic_version=2)
    assert await world.merged() == [*OLD, ("e", 105), ("e", 105)]
    (event,) = world.events("taken_over")
    assert (event["logic_version_before"], event["logic_version"]) == (1, 2)
    assert (event["batches"], event["different"]) == (0, 0)


@pytest.mark.parametrize("settings", [QUIET, SNAPSHOTS])
async def test_a_new_build_takes_over_what_a_killed_one_wrote_and_writes_none_of_it(
    world: World, settings
):
    await handle(world, "abcd", is_killed=True, settings=settings)
    await handle(world, "e", core=NewCore(), logic_version=2)
    assert await world.merged() == [*OLD, ("e", 105), ("e", 105)]
    (event,) = world.events("taken_over")
    count, first = (4, 0) if settings is QUIET else (1, 4)
    assert (event["batches"], event["different"], event["first_different"]) == (count, count, first)
    assert (event["outputs_written"], event["outputs_dropped"]) == (count, 2 * count)


async def test_a_new_build_that_is_killed_goes_on_from_what_it_wrote_itself(world: World):
    await handle(world, "abcd", is_killed=True)
    for group_id in "ef":
        await handle(world, group_id, core=NewCore(), logic_version=2, is_killed=True)
    await handle(world, "g", core=NewCore(), logic_version=2)
    new = [(group_id, n) for group_id, n in (("e", 105), ("f", 106), ("g", 107)) for _ in range(2)]
    assert await world.merged() == [*OLD, *new]
    assert len(world.events("taken_over")) == 1
    versions = [batch.logic_version for batch in await world.journal()]
    assert versions == [1] * 4 + [2] * (len(versions) - 4)


async def test_a_build_that_differs_at_the_same_version_is_refused(world: World):
    await handle(world, "abcd", is_killed=True)
    with pytest.raises(ExceptionGroup) as died:
        async with world.task(core=NewCore()):
            await asyncio.sleep(5)
    assert died.group_contains(DivergedError, match="batch 0 wrote 1 records")


@pytest.mark.parametrize("is_killed", [False, True])
async def test_an_older_build_is_refused_by_name(world: World, *, is_killed: bool):
    await handle(world, "ab", logic_version=3, is_killed=is_killed)
    with pytest.raises(ExceptionGroup) as died:
        async with world.task(logic_version=2):
            await asyncio.sleep(5)
    assert died.group_contains(
        NewerLogicError,
        match="written by logic version 3 of merger, this build has 2: go on with a build that",
    )
    await handle(world, "c", logic_version=3)
    assert [group_id for group_id, _ in await world.merged()] == ["a", "b", "c"]


async def test_an_older_build_goes_on_behind_the_clean_stop_of_one_whose_snapshots_it_reads(
    world: World,
):
    await handle(world, "ab")
    await handle(world, "c", core=NewCore(), logic_version=2, snapshots_since=1)
    await handle(world, "d")
    await handle(world, "e", core=NewCore(), logic_version=2, snapshots_since=1)
    new_c, new_e = ("c", 103), ("e", 105)
    assert await world.merged() == [*OLD[:2], new_c, new_c, OLD[3], new_e, new_e]
    written = [(b.logic_version, b.snapshot_logic_version) for b in await world.journal()]
    # Batches, and a snapshot where a build ends and where another begins.
    old, new, old_state, new_state = (1, 0), (2, 0), (1, 1), (1, 2)
    assert written == [
        *[old, old, old_state],
        *[new_state, new, new_state],
        *[old_state, old, old_state],
        *[new_state, new, new_state],
    ]


async def test_an_older_build_refuses_what_a_killed_newer_one_handled(world: World):
    await handle(world, "ab")
    await handle(world, "c", is_killed=True, core=NewCore(), logic_version=2, snapshots_since=1)
    with pytest.raises(ExceptionGroup) as died:
        async with world.task():
            await asyncio.sleep(5)
    assert died.group_contains(NewerLogicError, match="written by logic version 2 of merger")
    async with world.task(core=NewCore(), logic_version=2, snapshots_since=1):
        pass
    await handle(world, "d")
    assert (await world.merged())[-1] == ("d", 4)


async def test_a_replay_compares_what_its_own_version_wrote_and_says_whose_the_rest_is(
    world: World,
):
    await handle(world, "abcd", is_killed=True)
    await handle(world, "ef", core=NewCore(), logic_version=2, is_killed=True)
    await world.log.create_topics({topics.MERGED_TREES.name: 1})
    lines: list[str] = []
    transform = Transform(
        service="merger",
        inputs=(topics.SCORED_GROUPS,),
        journal=topics.MERGER_JOURNAL,
        make_core=lambda _: NewCore(),
        logic_version=2,
    )
    status = await replay_transform(
        world.log, transform, configuration=CONFIGURATION, partition=0, say=lines.append
    )
    assert (status, lines) == (
        0,
        [
            "merger 0: 2 inputs, 0 ticks, 4 outputs in batches 5 to 6 (those before are of logic "
            "version 1 and left out): equal"
        ],
    )


async def test_a_replay_compares_behind_the_clean_stops_of_a_build_whose_snapshots_others_read(
    world: World,
):
    """Its snapshots name the older version, and are still its own."""
    await handle(world, "ab")
    for group_id in "cd":
        await handle(world, group_id, core=NewCore(), logic_version=2, snapshots_since=1)
    plan = world.plan(QUIET, tick_s=0.0, logic_version=2, snapshots_since=1)
    result = await compare(world.log, plan, NewCore(), outputs=(MERGED,))
    # Batches 0 to 2 are the older build's, 3 is the snapshot of the takeover.
    assert (result.difference, result.batch_first, result.inputs) == (None, 4, 2)
    assert len(world.events("taken_over")) == 1


async def test_a_replay_of_another_versions_journal_is_refused_by_name(world: World):
    await handle(world, "ab")
    plan = world.plan(QUIET, tick_s=0.0, logic_version=2)
    with pytest.raises(JournalError, match="by logic version 1 of merger, this build has 2"):
        await compare(world.log, plan, NewCore(), outputs=(MERGED,))


async def test_a_quiet_input_stays_where_it_was_across_a_takeover(world: World):
    await handle(world, "abcd")
    async with world.task(core=NewCore(), logic_version=2):
        await world.until(lambda: len(world.events("taken_over")), 1)
        await asyncio.sleep(0.05)
    world.log._store.positions.clear()
    await world.log.trim({SCORED: 4})
    await handle(world, "e", core=NewCore(), logic_version=2)
    assert (await world.merged())[-1] == ("e", 105)
