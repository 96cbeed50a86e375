"""Panel, audit and report from a run on a log."""

import io
import json

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from forgemq_audit import run_report
from forgemq_bus.log import Emit
from forgemq_bus.memory import MemoryLog
from forgemq_contracts.groups import MergedGroup, RetiredGroup, ScoredGroup
from forgemq_contracts.messages import Output
from forgemq_contracts.run import EndedRun, StartedRun
from forgemq_contracts.topics import (
    ENDED_RUNS,
    LOADED_WEIGHTS,
    MERGED_GROUPS,
    REPORTED_ENGINES,
    RETIRED_GROUPS,
    STARTED_RUNS,
    Topic,
)
from forgemq_contracts.weights import LoadedWeights, ReportedEngine
from forgemq_launcher.commands.inspection import GROUPS_SHOWN_MAX, print_groups
from forgemq_launcher.display.curves import CurveWriter
from forgemq_launcher.display.headlines import headlines
from forgemq_launcher.display.panel import PanelView, ShownService, line, panel
from forgemq_launcher.display.report_files import table, write_report
from forgemq_launcher.display.screen import Screen
from forgemq_launcher.records.follower import Follower
from forgemq_launcher.records.run_topics import create_topics, last_trained_step
from forgemq_launcher.run_folder import RunFolder, RunFolderError
from forgemq_run_view.view import RunView
from forgemq_shell.records import emit_of
from forgemq_telemetry.curves import read_curves
from tests.unit.run_view.imported import imports
from tests.unit.run_view.synthetic import DOMAIN, SyntheticRun, configuration, started

SHOWN = PanelView(
    engine_status="starting",
    is_engine_up=True,
    services=(ShownService(name="gateway", is_up=True, detail="(1)"),),
    footer="http://127.0.0.1:8080",
    events=("something happened",),
)


async def log_of(run: SyntheticRun, *others: Output, steps: int = 3) -> MemoryLog:
    log = MemoryLog(run="r")
    await create_topics(log, configuration(steps=steps))
    writer = await log.writer()
    messages = [Output(topic=m.topic, partition=m.partition, record=m.record) for m in run.messages]
    await writer.write_all([emit_of(output) for output in (*messages, *others)])
    return log


def start(at_ms: int) -> Output:
    record = StartedRun(run="r", configuration=configuration(), blobs="/b", started_ms=at_ms)
    return Output(topic=STARTED_RUNS.name, partition=0, record=record)


def end(at_ms: int) -> Output:
    record = EndedRun(run="r", reason="interrupted", ended_ms=at_ms)
    return Output(topic=ENDED_RUNS.name, partition=0, record=record)


@pytest.mark.slow
async def test_a_completed_run_is_reported_with_every_guarantee_held(tmp_path):
    run = SyntheticRun().play(steps=3)
    log = await log_of(run, start(1_000))
    result, follower = await run_report.audit_run(log, started(), reason="completed", now_ms=61_000)
    assert result.guarantees == dict.fromkeys(("G1", "G2", "G3", "G4", "G5"), True)
    assert (result.steps, result.samples, result.groups_retired) == (3, 24, {"trained": 6})
    assert (result.merge_ratio_per_request, result.merge_ratio_append) == (3.0, 1.5)
    assert result.duration_s == 60.0
    assert (result.success_start, result.success_end) == (None, None)
    folder = RunFolder(tmp_path / "r")
    folder.make(configuration())
    write_report(result, follower.view.state(now_ms=61_000), folder=folder.path)
    written = json.loads((folder / "report.json").read_text())
    assert written["guarantees"]["G4"] is True
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")


async def test_the_report_of_a_run_with_a_broken_guarantee_says_which_and_why():
    run = SyntheticRun().play(steps=3)
    run.messages = [m for m in run.messages if m.topic != RETIRED_GROUPS.name]
    log = await log_of(run)
    result, _ = await run_report.audit_run(log, started(), reason="completed", now_ms=2_000)
    assert not result.guarantees["G1"]
    console = Console(file=io.StringIO(), width=120)
    console.print(table(result))
    text = console.file.getvalue()
    assert "DID NOT HOLD" in text
    assert "g-0 was never retired" in text


async def test_the_attention_ratio_is_pairs_of_single_requests_over_pairs_of_trees():
    run = SyntheticRun().play(steps=1)
    log = await log_of(run)
    result, _ = await run_report.audit_run(log, started(steps=1), reason="completed", now_ms=2_000)
    # Each episode has requests of 6 and 10 tokens: 21 + 55 pairs; the metrics say 5,000 pairs.
    assert result.merge_ratio_attention == pytest.approx(2 * 2 * (21 + 55) / 5_000)


@pytest.mark.parametrize(
    ("events", "now_ms", "expected_s"),
    [
        ([start(1_000)], 5_000, 4.0),
        ([start(1_000), end(3_000), start(50_000)], 60_000, 12.0),
        ([start(1_000), start(50_000), end(55_000)], 99_000, 5.0),
    ],
)
async def test_time_counts_while_the_run_is_up(events, now_ms, expected_s):
    log = await log_of(SyntheticRun(), *events)
    assert await run_report.up_s(log, configuration(), now_ms=now_ms) == expected_s


async def test_records_that_do_not_decode_are_skipped():
    run = SyntheticRun().play(steps=1)
    log = await log_of(run)
    sound = Follower(log, started())
    await sound.catch_up()
    writer = await log.writer()
    await writer.write(
        Emit(topic=RETIRED_GROUPS.name, partition=0, key=b"g", value=b"not a record")
    )
    follower = Follower(log, started())
    await follower.catch_up()
    assert follower.view.state(now_ms=0) == sound.view.state(now_ms=0)
    assert follower.view.state(now_ms=0).steps_trained == 1


def over(number: int, topic: Topic) -> Output:
    """The record that a group has failed, or that it was merged to train."""
    fields = {"group_id": f"g-{number}", "domain": DOMAIN, "purpose": "train"}
    record = (
        RetiredGroup(**fields, reason="failed", detail="why")
        if topic is RETIRED_GROUPS
        else MergedGroup(**fields, partition=0)
    )
    return Output(topic=topic.name, partition=0, record=record)


async def test_failed_groups_between_those_that_train_do_not_end_the_run():
    """Merged groups retire only when their step has trained, and no record here is `trained`."""
    failed, merged = RETIRED_GROUPS, MERGED_GROUPS
    topics = [failed, failed, merged] * 5
    first = msgspec.structs.replace(started(), started_ms=0)
    log = await log_of(SyntheticRun(), *(over(n, topic) for n, topic in enumerate(topics)))
    follower = Follower(log, first, groups_failed_max=3)
    await follower.catch_up()
    assert follower.failing.verdict() == ""
    writer = await log.writer()
    await writer.write_all([emit_of(over(n, failed)) for n in range(20, 23)])
    follower = Follower(log, first, groups_failed_max=3)
    await follower.catch_up()
    assert follower.failing.verdict().startswith(f"3 groups of {DOMAIN} failed in a row")


def state_of(run: SyntheticRun):
    view = RunView(started())
    for message in run.messages:
        view.apply(message)
    return view.state(now_ms=20_000)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_the_panel_fits_80_columns_at_every_stage(steps):
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    console.print(panel(state_of(SyntheticRun().play(steps=steps)), SHOWN))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any(f"{steps}/3" in text for text in lines)
    assert any("gateway(1)" in text for text in lines)


def test_the_plain_line_has_the_numbers_of_the_panel():
    assert line(state_of(SyntheticRun().play(steps=2))).startswith(
        "step 2/3 success 1.00 reward 1.40"
    )


@pytest.mark.parametrize("is_dumb_terminal", [False, True])
def test_without_a_terminal_for_the_panel_a_line_comes_for_each_step_and_no_more(is_dumb_terminal):
    now_s = [0.0]
    console = Console(
        file=io.StringIO(),
        width=200,
        force_terminal=is_dumb_terminal,
        _environ={"TERM": "dumb"} if is_dumb_terminal else {},
    )
    screen = Screen(console, clock_s=lambda: now_s[0])
    screen.open()
    run = SyntheticRun()
    for step in range(2):
        run.train(step, [run.generate(2 * step + i, version=step) for i in range(2)])
        for _ in range(5):
            now_s[0] += 1
            screen.show(state_of(run), SHOWN)
    screen.close()
    lines = console.file.getvalue().splitlines()
    assert [text.split()[3] for text in lines] == ["1/3", "2/3"]


def test_headlines_are_the_steps_and_weights_between_two_states():
    run = SyntheticRun().play(steps=1)
    before = state_of(run)
    run.train(1, [run.generate(2 + i, version=1) for i in range(2)])
    assert headlines(None, before) == []
    assert [text.split(":")[0].split(" (")[0] for text in headlines(before, state_of(run))] == [
        "step 1 trained",
        "lane 0 serves version 2",
    ]


def test_a_lane_that_does_not_answer_yet_makes_no_headline():
    run = SyntheticRun()
    report = ReportedEngine(
        lane=0,
        epoch=1,
        url="http://e",
        is_serving=False,
        lineage=0,
        version=0,
        running=0,
        queued=0,
        reported_ms=1,
    )
    before = state_of(run)
    run.put(REPORTED_ENGINES, report)
    assert headlines(before, state_of(run)) == []
    run.put(REPORTED_ENGINES, msgspec.structs.replace(report, is_serving=True, reported_ms=2))
    # How it has its weights is on another topic, and read later here.
    assert headlines(before, state_of(run)) == []
    run.put(
        LOADED_WEIGHTS,
        LoadedWeights(lane=0, epoch=1, lineage=0, version=0, path="start", duration_s=0.0),
    )
    assert headlines(before, state_of(run)) == ["lane 0 serves version 0 (start, paused 0.00 s)"]


def test_a_lane_is_said_to_serve_a_version_by_the_way_that_this_version_came():
    """Its heartbeat is read before the record of the load, and the next load before a heartbeat."""
    run = SyntheticRun()
    run.publish(1)
    before = state_of(run)
    weights = {"lane": 0, "epoch": 1, "lineage": 1}
    report = {"url": "http://e", "is_serving": True, "running": 3, "queued": 1}
    run.put(REPORTED_ENGINES, ReportedEngine(**weights, **report, version=2, reported_ms=2))
    assert headlines(before, state_of(run)) == []
    for version, path, paused_s in ((2, "durable", 0.5), (3, "fast", 0.1)):
        load = LoadedWeights(
            **weights, version=version, path=path, duration_s=1.0, paused_s=paused_s
        )
        run.put(LOADED_WEIGHTS, load)
    served_2 = state_of(run)
    assert headlines(before, served_2) == ["lane 0 serves version 2 (durable, paused 0.50 s)"]
    run.put(REPORTED_ENGINES, ReportedEngine(**weights, **report, version=3, reported_ms=3))
    assert headlines(served_2, state_of(run)) == ["lane 0 serves version 3 (fast, paused 0.10 s)"]


async def test_a_resumed_run_names_the_last_step_that_was_trained():
    assert await last_trained_step(await log_of(SyntheticRun()), configuration()) == -1
    run = SyntheticRun().play(steps=3)
    assert await last_trained_step(await log_of(run), configuration()) == 2


def test_curves_are_written_once_also_over_restarts(tmp_path):
    state = state_of(SyntheticRun().play(steps=3))
    for _ in range(3):
        writer = CurveWriter(tmp_path)
        writer.write(state, is_end=True)
        writer.close()
    lines = [json.loads(text) for text in (tmp_path / "curves.jsonl").read_text().splitlines()]
    assert [(each["step"], each["success"]) for each in lines] == [(0, 0.5), (1, 1.0), (2, 1.0)]


def test_curves_do_not_depend_on_the_order_in_which_the_partitions_are_read(tmp_path):
    """As floats 0.1 + 0.1 + 0.1 + 0.3 is more than 0.1 + 0.3 + 0.1 + 0.1."""
    run = SyntheticRun().play(steps=1)
    rewards = iter((0.1, 0.1, 0.1, 0.3))
    for index, message in enumerate(run.messages):
        if isinstance(scored := message.record, ScoredGroup):
            episodes = tuple(replace(each, total=next(rewards)) for each in scored.episodes)
            run.messages[index] = replace(message, record=replace(scored, episodes=episodes))
    written = []
    for name, messages in (("a", run.messages), ("b", run.messages[::-1])):
        writer = CurveWriter(tmp_path / name)
        writer.write(state_of(SyntheticRun(messages=messages)), is_end=True)
        writer.close()
        written.append((tmp_path / name / "curves.jsonl").read_bytes())
    assert written[0] == written[1]
    assert read_curves(tmp_path / "a")[0]["reward"] == 0.15


def test_a_stopped_run_has_a_line_for_each_step_and_the_newest_again_if_it_is_resumed(tmp_path):
    """Version 1 has episodes only after the stop, as groups that it admitted were still open."""

    def write(run: SyntheticRun, *, is_end: bool = False) -> list[tuple[int, float | None]]:
        writer = CurveWriter(tmp_path)
        writer.write(state_of(run), is_end=is_end)
        writer.close()
        lines = map(json.loads, (tmp_path / "curves.jsonl").read_text().splitlines())
        return [(each["step"], each.get("success")) for each in lines]

    run = SyntheticRun()
    for step in range(2):
        run.train(step, [run.generate(2 * step + i, version=0) for i in range(2)])
    assert write(run) == []
    stopped = [(0, 0.5), (1, None)]
    assert write(run, is_end=True) == stopped
    assert write(run, is_end=True) == stopped
    late = [run.generate(4 + i, version=1) for i in range(2)]
    assert write(run) == stopped
    run.train(2, late, is_last=True)
    assert write(run) == stopped
    assert write(run, is_end=True) == [*stopped, (1, 1.0), (2, None)]
    counting = read_curves(tmp_path)
    assert [each.get("success") for each in counting.values()] == [0.5, 1.0, None]


def test_the_curves_of_a_run_are_written_for_tensorboard_if_asked(tmp_path):
    writer = CurveWriter(tmp_path, for_tensorboard=True)
    writer.write(state_of(SyntheticRun().play(steps=3)), is_end=True)
    writer.close()
    (events,) = tmp_path.glob("events.out.tfevents.*")
    tags = {v.tag for e in EventFileLoader(str(events)).Load() for v in e.summary.value}
    assert {"success", "reward", "lr", "staleness_max"} <= tags


def test_a_run_is_held_by_one_launcher_and_made_once(tmp_path):
    folder = RunFolder(tmp_path / "r")
    folder.make(configuration())
    assert folder.configuration() == configuration()
    with pytest.raises(RunFolderError, match="--resume r"):
        folder.make(configuration())
    assert not folder.is_up()
    with folder.locked():
        other = RunFolder(tmp_path / "r")
        assert other.is_up()
        with pytest.raises(RunFolderError, match="already up"), other.locked():
            pass
    assert folder.admin_key() == folder.admin_key()
    assert (folder / "admin.key").stat().st_mode & 0o077 == 0


def test_the_list_of_groups_cuts_nothing_in_80_columns():
    run, follower = SyntheticRun(), Follower(MemoryLog(run="r"), started())
    run.admit("g-0000000000000000007", index=7, version=0)
    run.retire("g-0000000000000000007", reason="zero_variance")
    for message in run.messages:
        follower.view.apply(message)
    console = Console(file=io.StringIO(), width=80)
    print_groups(follower, console)
    printed = console.file.getvalue()
    names = ("group", "index", "state", "step", "turns", "truncated", "success")
    assert [
        name for name in (*names, "g-0000000000000000007", "zero_variance") if name not in printed
    ] == []
    assert "\u2026" not in printed
    assert "older" not in printed


def test_the_list_of_groups_says_that_it_leaves_older_ones_out():
    follower = Follower(MemoryLog(run="r"), started())
    for message in imports(GROUPS_SHOWN_MAX // 4 + 1, outcomes=0):
        follower.view.apply(message)
    console = Console(file=io.StringIO(), width=80)
    print_groups(follower, console)
    printed = console.file.getvalue()
    assert ("i-0 " in printed, "i-1 " in printed) == (False, True)
    assert printed.endswith(
        "the newest 500 of 501 groups are listed; with its id inspect shows an older one\n"
    )
