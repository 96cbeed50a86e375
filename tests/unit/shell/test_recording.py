"""A task's recording: it replays as the log does, and lacks what the log lacks."""

from pathlib import Path

import pytest

from forgemq_bus.log import Emit
from forgemq_shell.comparison import Comparison, compare
from forgemq_shell.journal import JournalError
from forgemq_shell.recorded_log import RecordedLog
from forgemq_shell.recording import (
    Recording,
    RecordingError,
    read_recording,
    record_task,
    write_recording,
)
from tests.simulation.counting_core import CountingCore
from tests.unit.shell.task_world import MERGED, QUIET, SCORED, World
from tests.unit.shell.test_comparison import CONFIGURATION, DEAD, SNAPSHOTS


async def recorded(world: World) -> Recording:
    plan = world.plan(QUIET, tick_s=0.0)
    return await record_task(world.log, plan, configuration=CONFIGURATION, outputs=(MERGED, DEAD))


async def compared(world: World, recording: Recording) -> Comparison:
    plan = world.plan(QUIET, tick_s=0.0)
    return await compare(RecordedLog(recording), plan, CountingCore(), outputs=(MERGED, DEAD))


async def test_a_recording_compares_as_the_log_does_after_a_trip_through_a_file(
    world: World, tmp_path: Path
):
    await world.handle_new(4, settings=SNAPSHOTS)
    await world.write([Emit(topic=DEAD.topic, partition=0, key=b"k", value=b"from a neighbour")])
    before = await recorded(world)
    write_recording(before, tmp_path / "a" / "merger-0.recording")
    recording = read_recording(tmp_path / "a" / "merger-0.recording")
    assert recording == before
    result = await compared(world, recording)
    assert (result.difference, result.inputs, result.outputs) == (None, 4, 4)
    assert {part.topic: len(part.records) for part in recording.partitions} == {
        "merger-journal-v1": 6,
        SCORED.topic: 4,
        MERGED.topic: 4,
        DEAD.topic: 0,
    }


async def test_inputs_that_the_log_had_lost_are_missed_by_the_replay(world: World):
    await world.handle_new(4)
    await world.log.trim({SCORED: 2})
    with pytest.raises(JournalError, match=r"record 0 is needed but the oldest one kept is 2$"):
        await compared(world, await recorded(world))


async def test_a_recording_of_a_task_that_did_nothing_is_empty(world: World):
    assert (await recorded(world)).partitions == ()


async def test_a_task_with_more_bytes_than_a_recording_may_have_is_refused(world: World):
    await world.handle_new(4)
    with pytest.raises(RecordingError, match=r"the task has more than 100 bytes of records"):
        await record_task(
            world.log,
            world.plan(QUIET, tick_s=0.0),
            configuration=CONFIGURATION,
            outputs=(MERGED, DEAD),
            bytes_max=100,
        )


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path):
    path = tmp_path / "merger-0.recording"
    write_recording(
        Recording(service="merger", partition=0, configuration=CONFIGURATION, partitions=()), path
    )
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(RecordingError, match="cannot be read as a recording"):
        read_recording(path)
