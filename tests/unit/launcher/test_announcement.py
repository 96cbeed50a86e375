"""What a start announces: where it continues, and what differs from the start before."""

from pathlib import Path
from typing import Literal

import msgspec
import pytest

from forgemq_bus.errors import BlobError
from forgemq_bus.memory import MemoryLog
from forgemq_contracts.lora import Lora
from forgemq_contracts.messages import Output
from forgemq_contracts.read_tasks import ReadTasks
from forgemq_contracts.run import EndedRun, RunConfiguration, StartedRun
from forgemq_contracts.topics import ENDED_RUNS, SCHEDULED_STEPS, STARTED_RUNS
from forgemq_launcher.core.configuration import ConfigurationError
from forgemq_launcher.records.announcement import check_unfinished, next_start, start_before
from forgemq_launcher.records.run_topics import create_topics
from forgemq_shell.records import emit_of
from tests.unit.run_view.synthetic import SyntheticRun, configuration

WAS = configuration(steps=5)


def with_steps(steps: int) -> RunConfiguration:
    return msgspec.structs.replace(WAS, trainer=msgspec.structs.replace(WAS.trainer, steps=steps))


def with_lr(lr: float) -> RunConfiguration:
    return msgspec.structs.replace(WAS, optimizer=msgspec.structs.replace(WAS.optimizer, lr=lr))


async def log_of(*, steps_played: int, last: bool = False) -> MemoryLog:
    """A run of five steps that was started once and stopped after some of them."""
    log = MemoryLog(run="r")
    await create_topics(log, WAS)
    await log.create_topics({STARTED_RUNS.name: 1})
    run = SyntheticRun().play(steps=steps_played)
    outputs = [Output(topic=m.topic, partition=m.partition, record=m.record) for m in run.messages]
    outputs = [_ended_by(output, is_last=last) for output in outputs]
    first = await next_start(log, WAS, blobs="/b", now_ms=1)
    outputs.append(Output(topic=STARTED_RUNS.name, partition=0, record=first))
    await (await log.writer()).write_all([emit_of(output) for output in outputs])
    return log


async def end(log: MemoryLog, reason: Literal["completed", "interrupted", "failed"]) -> None:
    """Write the end of the newest start."""
    await log.create_topics({ENDED_RUNS.name: 1})
    ended = EndedRun(run="r", reason=reason, ended_ms=2)
    output = Output(topic=ENDED_RUNS.name, partition=0, record=ended)
    await (await log.writer()).write_all([emit_of(output)])


def _ended_by(output: Output, *, is_last: bool) -> Output:
    """The synthetic run calls the newest step it plays the last."""
    if output.topic != SCHEDULED_STEPS.name or not output.record.is_last:
        return output
    record = msgspec.structs.replace(output.record, is_last=is_last)
    return msgspec.structs.replace(output, record=record)


async def test_the_first_start_changes_nothing_and_the_next_one_says_what_it_changes():
    log = await log_of(steps_played=3)
    same = await next_start(log, WAS, blobs="/b", now_ms=2)
    assert (same.resumed_from_step, same.changes) == (2, ())
    other = await next_start(log, with_lr(0.5), blobs="/b", now_ms=2)
    assert other.changes == (f"optimizer.lr: {WAS.optimizer.lr!r} -> 0.5",)
    assert other.configuration.optimizer.lr == 0.5


async def test_a_start_that_reads_no_files_keeps_what_the_start_before_found_in_them():
    log = await log_of(steps_played=3)
    known = (ReadTasks(domain="d", field="task_file", count=3, checksum="c"),)
    first = await next_start(log, WAS, blobs="/b", now_ms=2)
    assert first.tasks == ()
    first = msgspec.structs.replace(first, tasks=known)
    output = Output(topic=STARTED_RUNS.name, partition=0, record=first)
    await (await log.writer()).write_all([emit_of(output)])
    assert (await next_start(log, WAS, blobs="/b", now_ms=3)).tasks == known


@pytest.mark.parametrize("steps", [4, 6, 100])
async def test_the_number_of_steps_may_change_until_the_last_is_scheduled(steps):
    log = await log_of(steps_played=3)
    started = await next_start(log, with_steps(steps), blobs="/b", now_ms=2)
    assert started.changes == (f"trainer.steps: 5 -> {steps}",)


@pytest.mark.parametrize("steps", [1, 3])
async def test_steps_that_are_scheduled_already_are_refused(steps):
    log = await log_of(steps_played=3)
    with pytest.raises(ConfigurationError, match=r"trainer\.steps: 3 steps .* at least 4, got"):
        await next_start(log, with_steps(steps), blobs="/b", now_ms=2)


async def test_a_run_whose_last_step_is_scheduled_cannot_go_on():
    log = await log_of(steps_played=5, last=True)
    with pytest.raises(ConfigurationError, match=r"trainer\.steps: step 4 is .* the last one"):
        await next_start(log, with_steps(9), blobs="/b", now_ms=2)


@pytest.mark.parametrize("reason", ["interrupted", "failed", None])
async def test_a_run_that_did_not_complete_goes_on(reason):
    log = await log_of(steps_played=5, last=True)
    if reason is not None:
        await end(log, reason)
    await check_unfinished(log, WAS)
    await check_unfinished(MemoryLog(run="new"), WAS)


@pytest.mark.parametrize(
    ("lora", "how"),
    [(None, "with model.path=<runs>/r/checkpoints"), (Lora(rank=4), "forgemq merge <runs>/r/")],
)
async def test_a_run_that_is_completed_is_refused_with_how_to_train_on(lora, how):
    log = await log_of(steps_played=5, last=True)
    await end(log, "completed")
    with pytest.raises(ConfigurationError, match=f"^run r is completed, .*{how}"):
        await check_unfinished(log, msgspec.structs.replace(WAS, lora=lora))


async def test_a_field_that_must_stay_is_refused_by_what_the_log_says():
    log = await log_of(steps_played=1)
    now = msgspec.structs.replace(WAS, seed=WAS.seed + 1)
    with pytest.raises(ConfigurationError, match="seed was 0 when this run was trained"):
        await next_start(log, now, blobs="/b", now_ms=2)


async def test_a_run_that_was_deleted_begins_anew_with_whatever_it_is_asked_for():
    log = MemoryLog(run="r")
    await log.create_topics({STARTED_RUNS.name: 1})
    was = StartedRun(run="r", configuration=WAS, blobs="/b", started_ms=1, resumed_from_step=-1)
    start = Output(topic=STARTED_RUNS.name, partition=0, record=was)
    await (await log.writer()).write_all([emit_of(start)])
    now = msgspec.structs.replace(WAS, seed=WAS.seed + 1)
    started = await next_start(log, now, blobs="/b", now_ms=2)
    assert (started.configuration.seed, started.changes) == (WAS.seed + 1, ())
    assert await start_before(log, "r") == was


@pytest.mark.parametrize(("plays_here", "is_mounted"), [(True, False), (False, True)])
async def test_a_start_makes_the_folder_of_blobs_and_a_resume_does_not(
    tmp_path: Path, plays_here: bool, is_mounted: bool
) -> None:
    if is_mounted:
        (tmp_path / "blobs").mkdir()
    log = MemoryLog(run="r")
    await log.create_topics({STARTED_RUNS.name: 1})

    async def start(now_ms: int) -> StartedRun:
        return await next_start(
            log, WAS, blobs=str(tmp_path / "blobs"), now_ms=now_ms, plays_here=plays_here
        )

    first = await start(1)
    output = Output(topic=STARTED_RUNS.name, partition=0, record=first)
    await (await log.writer()).write_all([emit_of(output)])
    assert first.has_blob_folder
    assert (tmp_path / "blobs/values/r").is_dir()
    assert (await start(2)).has_blob_folder
    (tmp_path / "blobs").rename(tmp_path / "away")
    if plays_here:
        with pytest.raises(BlobError, match="mounted"):
            await start(3)
    else:
        assert (await start(3)).has_blob_folder
    assert not (tmp_path / "blobs").exists()


async def test_where_the_blobs_are_not_reached_a_start_says_so(tmp_path: Path) -> None:
    log = MemoryLog(run="r")
    await log.create_topics({STARTED_RUNS.name: 1})
    started = await next_start(log, WAS, blobs=str(tmp_path / "blobs"), now_ms=1)
    assert not started.has_blob_folder
