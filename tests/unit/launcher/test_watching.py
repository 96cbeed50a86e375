"""What `forgemq watch` shows of a run on a log, and how it ends."""

import asyncio
import io
import shutil
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from forgemq_bus.blobs import BlobStore
from forgemq_bus.errors import BlobError
from forgemq_bus.memory import MemoryLog
from forgemq_contracts.fields import NamedValue
from forgemq_contracts.messages import Output
from forgemq_contracts.run import EndedRun
from forgemq_contracts.topics import FINISHED_COMPLETIONS
from forgemq_launcher.commands.watching import show_until_ended, status_of
from forgemq_launcher.display.panel import line
from forgemq_launcher.display.screen import Screen
from forgemq_launcher.records.follower import Follower
from forgemq_launcher.records.run_topics import create_topics
from forgemq_run_view.state import EvaluationPoint, Tally
from forgemq_shell.records import emit_of
from tests.unit.launcher.test_follower import end, log_of
from tests.unit.run_view.synthetic import SyntheticRun, configuration, started

END = end(61_000)
"""Of the synthetic run: interrupted."""


async def put(log: MemoryLog, run: SyntheticRun, *others: Output, first: int = 0) -> None:
    writer = await log.writer()
    messages = run.messages[first:]
    outputs = [Output(topic=m.topic, partition=m.partition, record=m.record) for m in messages]
    await writer.write_all([emit_of(output) for output in (*outputs, *others)])


async def watched(log: MemoryLog, *, is_terminal: bool = False) -> tuple[EndedRun, str]:
    """How the run ended, and what a watcher printed until then."""
    console = Console(file=io.StringIO(), width=100, force_terminal=is_terminal, color_system=None)
    screen, follower = Screen(console), Follower(log, started())
    await follower.catch_up()
    screen.open()
    async with asyncio.timeout(10):
        ended = await show_until_ended(follower, screen)
    assert ended is not None
    screen.close()
    return ended, console.file.getvalue()


async def test_a_run_that_is_over_is_one_line_without_a_terminal() -> None:
    ended, printed = await watched(await log_of(SyntheticRun().play(steps=3), END))
    assert ended == END.record
    (line,) = printed.splitlines()
    assert "step 3/3 success 1.00 reward 1.40" in line


async def test_the_plain_line_says_how_far_a_round_is_that_is_being_played() -> None:
    state = Follower(await log_of(SyntheticRun().play(steps=1)), started()).state()
    round_ = EvaluationPoint(
        round_name="start-sampled",
        is_greedy=False,
        version_min=0,
        version_max=0,
        groups=8,
        groups_ended=3,
        tally=Tally(episodes=3, success=0.0, reward=0.0, outcome=0.0, speed=0.0, process=0.0),
    )
    played = msgspec.structs.replace(round_, is_greedy=True, groups_ended=8)
    asked = msgspec.structs.replace(round_, version_min=None, version_max=None, groups_ended=0)
    shown = line(msgspec.structs.replace(state, evaluations=(round_, played, asked)))
    assert shown.endswith(" saving 0.0x; sampled v0: 3 of 8 played; sampled: 0 of 8 played")


@pytest.mark.parametrize(("equal", "expected"), [(2, False), (3, True)])
async def test_the_plain_line_says_if_most_groups_have_equal_returns(
    equal: int, expected: bool
) -> None:
    run = SyntheticRun().play(steps=1)
    for index in range(2, 2 + equal):
        run.generate(index, version=1)
        run.retire(f"g-{index}", reason="zero_variance")
    follower = Follower(await log_of(run), started())
    await follower.catch_up()
    shown = line(follower.state())
    assert ("3 groups had equal returns, 2 trained" in shown) is expected


@pytest.mark.slow
async def test_a_run_that_goes_on_is_followed_to_its_end_and_what_is_old_is_not_told_again() -> (
    None
):
    run = SyntheticRun().play(steps=1)
    log = await log_of(run)
    watching = asyncio.ensure_future(watched(log))
    await asyncio.sleep(0.2)
    assert not watching.done()
    written = len(run.messages)
    run.train(1, [run.generate(2 + i, version=1) for i in range(2)])
    await put(log, run, first=written)
    await asyncio.sleep(1.2)
    await put(log, run, END, first=len(run.messages))
    _, printed = await watching
    assert [f"step {n} trained" in printed for n in range(3)] == [False, True, False]
    assert [f"step {n}/3" in printed for n in range(4)] == [False, True, True, False]


async def test_a_terminal_shows_the_panel_with_each_service_and_how_long_it_is_silent() -> None:
    log = await log_of(SyntheticRun().play(steps=2), END)
    _, printed = await watched(log, is_terminal=True)
    assert "ForgeMQ r" in printed
    assert "Ctrl-C leaves the run alone" in printed
    # The run's records are some milliseconds old at its first minute, which is its end.
    assert "\u25cftrainer 60 s" in printed
    assert "lane 0 v2" in printed


@pytest.mark.parametrize(
    ("reason", "results", "status"),
    [
        ("completed", {"G1": 1.0, "success_end": 0.5}, 0),
        ("completed", {"G1": 1.0, "G4": 0.0}, 1),
        ("completed", {"shop_desk.pass_at_1": 0.0}, 0),
        ("interrupted", {"G1": 1.0}, 130),
        ("failed", {}, 1),
    ],
)
def test_the_status_is_the_one_that_the_run_ended_with(reason, results, status) -> None:
    values = tuple(NamedValue(name=name, value=value) for name, value in results.items())
    assert status_of(EndedRun(run="r", reason=reason, ended_ms=1, results=values)) == status


async def test_records_are_applied_once_by_catching_up_following_and_catching_up_again() -> None:
    run = SyntheticRun().play(steps=1)
    log = await log_of(run)
    follower = Follower(log, started())
    await follower.catch_up()
    written = len(run.messages)
    run.train(1, [run.generate(2 + i, version=1) for i in range(2)])
    await put(log, run, first=written)
    following = asyncio.ensure_future(follower.follow())
    await asyncio.sleep(0.1)
    following.cancel()
    await asyncio.wait([following])
    await follower.catch_up()
    state = follower.state()
    assert state.completions == len(list(run.of(FINISHED_COMPLETIONS)))
    assert (state.steps_trained, state.groups_admitted) == (2, 4)


async def test_without_the_blob_store_a_watcher_counts_the_records_that_are_on_the_log(
    tmp_path: Path,
) -> None:
    """Scores lie in the store, which is a folder that goes away; the other records are smaller."""
    run = SyntheticRun().play(steps=2)
    log = MemoryLog(
        run="r", blobs=BlobStore(str(tmp_path / "blobs"), run="r"), inline_bytes_max=600
    )
    await create_topics(log, configuration())
    await put(log, run)
    whole = Follower(log, started())
    await whole.catch_up()
    shutil.rmtree(tmp_path / "blobs")
    with pytest.raises(BlobError, match="is the blob store of the run mounted"):
        await Follower(log, started()).catch_up()
    told: list[BlobError] = []
    follower = Follower(log, started(), without_blobs=told.append)
    await follower.catch_up()
    assert [(s.steps_trained, s.completions) for s in (follower.state(), whole.state())] == (
        [(2, 16)] * 2
    )
    assert [point.tally.success for point in whole.state().versions] == [0.5, 1.0]
    assert follower.state().versions == ()
    assert len(told) == 1
