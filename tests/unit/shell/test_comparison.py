"""A replay compared with the log: equal, or the first difference."""

from collections.abc import Callable, Sequence

import msgspec
import pytest

from forgemq_bus.log import Emit, Place
from forgemq_contracts import topics
from forgemq_contracts.groups import MergedGroup
from forgemq_contracts.messages import Core, Event, Output
from forgemq_contracts.run import LogLayout, Model, Queue, RunConfiguration, Trainer
from forgemq_settings.environment import SettingsError
from forgemq_shell.comparison import Comparison, compare
from forgemq_shell.difference import difference_lines
from forgemq_shell.journal import JournalError
from forgemq_shell.replay_command import replay_transform
from forgemq_shell.transform import Transform
from tests.simulation.counting_core import CountingCore
from tests.unit.shell.task_world import MERGED, QUIET, SCORED, World

Change = Callable[[Sequence[Output]], Sequence[Output]]
DEAD = Place(topics.SCORED_GROUPS.dlq_name, 0)
SNAPSHOTS = msgspec.structs.replace(QUIET, snapshot_every_batches=3)
CONFIGURATION = RunConfiguration(
    run="r",
    seed=0,
    model=Model(path="m"),
    queues=(Queue(domain="d", task_source="m:t", agent="m:a"),),
    trainer=Trainer(steps=1),
    log=LogLayout(group_partitions=1),
)


class ChangedCore:
    """The counting core with other outputs for one group: another version of the code."""

    def __init__(self, change: Change, *, group_id: str) -> None:
        self._core = CountingCore()
        self._change = change
        self._group_id = group_id
        self.restore = self._core.restore
        self.snapshot = self._core.snapshot

    def handle(self, event: Event) -> Sequence[Output]:
        outputs = self._core.handle(event)
        record = outputs[0].record if outputs else None
        is_meant = isinstance(record, MergedGroup) and record.group_id == self._group_id
        return self._change(outputs) if is_meant else outputs


def with_tokens(tokens: int) -> Change:
    def change(outputs: Sequence[Output]) -> Sequence[Output]:
        (output,) = outputs
        return [
            Output(
                topic=output.topic,
                partition=output.partition,
                record=msgspec.structs.replace(output.record, tree_tokens=tokens),
            )
        ]

    return change


async def compared(world: World, core: Core | None = None) -> Comparison:
    plan = world.plan(QUIET, tick_s=0.0)
    return await compare(world.log, plan, core or CountingCore(), outputs=(MERGED, DEAD))


async def test_a_replay_of_several_lives_equals_the_log_dead_letters_included(world: World):
    await world.handle_new(3)
    bad = Emit(topic=SCORED.topic, partition=0, key=b"g-x", value=b"\xff", headers=())
    async with world.task(SNAPSHOTS):
        await world.write([bad])
        await world.until(lambda: world.log_size(DEAD), 1)
    await world.handle_new(4, first=3, settings=SNAPSHOTS)
    result = await compared(world)
    assert result.difference is None
    assert (result.batch_first, result.batch_last, result.batches) == (0, 11, 12)
    assert (result.inputs, result.outputs, result.outputs_trimmed) == (8, 8, 0)


async def test_the_first_record_that_differs_is_named_with_both_values(world: World):
    await world.handle_new(4)
    result = await compared(world, ChangedCore(with_tokens(77), group_id="g-2"))
    assert (result.batch_last, result.batches) == (
        2,
        3,
    )  # Nothing behind the first difference is compared.
    difference = result.difference
    assert difference is not None
    assert (difference.sequence, difference.place) == (2, MERGED)
    where, on_log, replayed = difference_lines(difference)
    assert difference.written is not None
    assert where == (
        f"first difference at merged-groups-v1/0@{difference.written.offset} (batch 2) in "
        "tree_tokens (1 on the log, 77 replayed)"
    )
    assert on_log.startswith("on the log: {")
    assert '"group_id":"g-2"' in on_log
    assert '"tree_tokens":1' in on_log
    assert '"tree_tokens":77' in replayed


@pytest.mark.parametrize(
    ("change", "words", "missing_in"),
    [
        (lambda _: (), "does not write this record", "replayed"),
        (lambda outputs: (*outputs, *outputs), "adds a record", "on the log"),
    ],
)
async def test_a_record_more_or_less_is_a_difference(world: World, change, words, missing_in):
    await world.handle_new(4)
    difference = (await compared(world, ChangedCore(change, group_id="g-1"))).difference
    assert difference is not None
    assert difference.sequence == 1
    where, *shown = difference_lines(difference)
    assert where.endswith(f"(batch 1): the replay {words}")
    (gone,) = [line for line in shown if line.endswith("no such record")]
    assert gone.startswith(missing_in)


async def test_a_record_on_the_log_that_the_task_did_not_journal_is_no_part_of_it(world: World):
    await world.handle_new(2)
    await world.write([Emit(topic=DEAD.topic, partition=0, key=b"k", value=b"from a neighbour")])
    await world.handle_new(1, first=2)
    assert (await compared(world)).difference is None


async def test_another_state_is_a_difference_even_where_no_output_shows_it(world: World):
    await world.handle_new(4, settings=SNAPSHOTS)

    core = ChangedCore(lambda outputs: outputs, group_id="g-0")
    snapshot = core.snapshot
    core.snapshot = lambda: snapshot() + b"?"
    difference = (await compared(world, core)).difference
    assert difference is not None
    assert (difference.place, difference.sequence) == (None, 3)
    assert difference_lines(difference) == (
        "differs in batch 3: the state after it is not the snapshot in the journal",
    )


async def test_a_replay_begins_behind_the_oldest_snapshot_after_which_inputs_are_kept(
    world: World,
):
    await world.handle_new(8, settings=SNAPSHOTS)  # snapshots 3, 7 and 10
    await world.log.trim({SCORED: 2})
    assert (await compared(world)).batch_first == 4
    await world.log.trim({SCORED: 4})
    result = await compared(world)
    assert (result.batch_first, result.batch_last, result.difference) == (8, 10, None)


async def test_without_the_inputs_a_replay_is_refused_and_says_which_are_gone(world: World):
    await world.handle_new(8, settings=SNAPSHOTS)
    await world.log.trim({SCORED: 7})
    with pytest.raises(JournalError, match="scored-groups-v1/0: record 6 is needed but the oldest"):
        await compared(world)


async def test_outputs_that_were_trimmed_are_compared_by_the_journals_digest(world: World):
    await world.handle_new(1)
    async with world.task():
        await world.score("g-1", "g-2", "g-3")
        await world.until_merged(4)
    entries = world.log._store.partition(_on_broker(MERGED)).entries
    offsets = [entry.record.offset for entry in entries if entry.record]
    await world.log.trim({MERGED: offsets[2]})
    result = await compared(world)
    assert (result.difference, result.outputs, result.outputs_trimmed) == (None, 4, 2)
    difference = (await compared(world, ChangedCore(with_tokens(9), group_id="g-1"))).difference
    assert difference is not None
    assert "digest" in difference.detail
    difference = (await compared(world, ChangedCore(with_tokens(9), group_id="g-3"))).difference
    assert difference is not None
    assert difference.place == MERGED


async def test_each_partition_gets_its_line_and_the_status_is_that_of_the_worst(world: World):
    def transform(core: Callable[[int], Core], logic_version: int) -> Transform:
        return Transform(
            service="merger",
            inputs=(topics.SCORED_GROUPS,),
            journal=topics.MERGER_JOURNAL,
            make_core=core,
            logic_version=logic_version,
        )

    async def replayed(
        core: Callable[[int], Core], *, partition: int | None = None, logic_version: int = 1
    ):
        lines: list[str] = []
        status = await replay_transform(
            world.log,
            transform(core, logic_version),
            configuration=CONFIGURATION,
            partition=partition,
            say=lines.append,
        )
        return status, lines

    await world.log.create_topics({topics.MERGED_TREES.name: 1})
    assert await replayed(lambda _: CountingCore()) == (
        0,
        ["merger 0: nothing journalled that could be replayed"],
    )
    await world.handle_new(4, settings=SNAPSHOTS)
    assert await replayed(lambda _: CountingCore(), partition=0) == (
        0,
        ["merger 0: 4 inputs, 0 ticks, 4 outputs in batches 0 to 5: equal"],
    )
    status, lines = await replayed(lambda _: ChangedCore(with_tokens(5), group_id="g-3"))
    assert status == 1
    assert lines[0].startswith("merger 0: 4 inputs, 0 ticks, 4 outputs in batches 0 to 4: first ")
    assert [line[:13] for line in lines[1:]] == ["  on the log:", "  replayed:  "]
    assert await replayed(lambda _: CountingCore(), logic_version=2) == (
        2,
        [
            "merger 0: cannot be replayed: the journal was written by logic version 1 of merger, "
            "this build has 2"
        ],
    )
    await world.log.trim({SCORED: 4})
    status, (line,) = await replayed(lambda _: CountingCore())
    assert status == 2
    assert line.startswith("merger 0: cannot be replayed: scored-groups-v1/0: record 3 is needed")
    assert line.endswith("a run with log.keep_for_replay = true keeps every input")
    with pytest.raises(SettingsError, match="--partition 1: the journal has partitions 0 to 0"):
        await replayed(lambda _: CountingCore(), partition=1)


def _on_broker(place: Place) -> Place:
    return Place(f"r.{place.topic}", place.partition)
