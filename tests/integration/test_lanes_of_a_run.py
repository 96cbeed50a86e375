"""A run on the real broker whose engines come and go while agents play: nothing is lost."""

import asyncio
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from forgemq_bus.blobs import BlobStore
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_bus.log import Record
from forgemq_contracts import topics
from forgemq_contracts.completions import (
    CancelledCompletion,
    FinishedCompletion,
    RequestedCompletion,
)
from forgemq_contracts.lane_plan import RequestedLane
from forgemq_launcher.upkeep.named_engines import health_refusal
from forgemq_settings.ports import free_port
from forgemq_sglang_cpu.server import EngineServer
from tests.engine_fixture import START_TIMEOUT_S, engine_options
from tests.integration.launched_run import DIALOGUE, FORGEMQ, ROOT, LaunchedRun
from tests.integration.run_log import GROUP_PARTITIONS, accounts, records_of
from tests.small_run import small_run

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(1800)]

STEPS = 40
SETTLED_S = 120.0
LANE_S_MAX = 400.0
WRITTEN_MS = 500
"""A request that was given to a lane may be written so much later."""
GROUPS_FORMED = r'"group_formed"[^\n]*"lanes":\[0,1,2\].*"group_formed"[^\n]*"lanes":\[0,2\]'
"""In the trainer's log, after lane 2 was added and lane 0 was resumed without lane 1."""


@pytest.fixture
def engine_urls(
    base_engine_url: str, engine_model: Path, tmp_path: Path
) -> Iterator[tuple[str, ...]]:
    """Three engines: that of the session, and two that end with the test."""
    with ExitStack() as stack:
        servers = [
            EngineServer(
                str(engine_model), tmp_path / name, port=free_port(), options=engine_options()
            )
            for name in ("second", "third")
        ]
        for server in servers:
            stack.callback(server.stop)
            server.start()
        for server in servers:
            server.wait_healthy(timeout_s=START_TIMEOUT_S)
        yield base_engine_url, *(server.url for server in servers)


def forgemq(run: LaunchedRun, *arguments: str) -> tuple[int, str]:
    """Run the tool as a user does; returns its status and what it printed."""
    done = subprocess.run(
        [str(FORGEMQ), *arguments],
        cwd=ROOT,
        env={**run.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def wait_until_gone(url: str) -> None:
    """Wait until no engine listens at this address."""
    deadline_s = time.monotonic() + SETTLED_S
    while health_refusal(url) != "Connection refused":
        assert time.monotonic() < deadline_s, f"an engine still listens at {url}"
        time.sleep(0.5)


def wall_ms() -> int:
    return round(time.time() * 1000)


def until_listed(
    run: LaunchedRun, run_id: str, lane: int, words: str, *, within_s: float = SETTLED_S
) -> None:
    """Wait until `forgemq lanes` says this of a lane."""
    deadline_s = time.monotonic() + within_s
    while True:
        status, text = forgemq(run, "lanes", run_id)
        assert status == 0, text
        if any(f" {lane} " in line[:8] and words in line for line in text.splitlines()):
            return
        assert time.monotonic() < deadline_s, text
        time.sleep(1.0)


def records_of_lanes(
    bootstrap: str, topic: topics.Topic, *, run_id: str, blobs: str, lanes: int = 3
) -> list[tuple[int, Any]]:
    """Every record of a topic of a run that has room for so many lanes: when written (ms), what."""
    layout = small_run(group_partitions=GROUP_PARTITIONS, lanes=lanes)
    count = topics.partition_count(topic, layout)

    async def read() -> list[Record]:
        connection = KafkaConnection(bootstrap=bootstrap)
        log = KafkaLog(connection, run=run_id, blobs=BlobStore(blobs, run=run_id))
        try:
            return await records_of(log, topic.name, partitions=count)
        finally:
            await log.close()

    return [(each.timestamp_ms, topics.decode(topic, each.value)) for each in asyncio.run(read())]


def test_engines_are_added_drained_and_removed_while_a_run_trains(
    kafka_bootstrap, engine_urls, new_run_id, tmp_path
):
    """New weights come in one process group of all lanes, which is formed for each change."""
    run_id = new_run_id()
    first, second, third = engine_urls
    environ = {
        "FORGEMQ_KAFKA": kafka_bootstrap,
        "FORGEMQ_ENGINE_URL": f"{first},{second}",
        "FORGEMQ_TRAINER_FAST_PATH": "gloo-shared",
    }
    run = LaunchedRun(tmp_path / "launcher", environ)
    try:
        run.start(
            DIALOGUE,
            f"run={run_id}",
            f"trainer.steps={STEPS}",
            "log.lanes=2",
            "log.lanes_max=3",
            "log.keep_for_replay=true",
        )
        run.wait_for_line("step 2 trained", within_s=300)
        refuse_bad_input(run, run_id)
        drained_ms, removed_ms = change_the_lanes(run, run_id, added=third)
        status = run.wait_for_end(within_s=900)
        assert run.left_behind() == []
        run.wait_for_log(run_id, "trainer", GROUPS_FORMED, within_s=1)
    finally:
        run.close()
    assert status == 0, run.story()
    report = run.report(run_id)
    assert all(report["guarantees"].values()), report["guarantees_checked"]
    assert report["staleness_max"] <= report["staleness_bound"] == 2
    assert report["groups_open"] == 0
    blobs = str(run.blobs(run_id))
    accounts(kafka_bootstrap, run=run_id, blobs=blobs).assert_exactly_once()
    changed, asked, answered, cancelled = (
        records_of_lanes(kafka_bootstrap, topic, run_id=run_id, blobs=blobs)
        for topic in (
            topics.REQUESTED_LANES,
            topics.REQUESTED_COMPLETIONS,
            topics.FINISHED_COMPLETIONS,
            topics.CANCELLED_COMPLETIONS,
        )
    )
    assert_the_plan_was_kept(changed, asked, drained_ms=drained_ms, removed_ms=removed_ms)
    assert_every_request_has_its_answer(asked, answered, cancelled)


def test_the_launcher_starts_and_stops_the_engines_of_lanes_that_come_and_go(
    kafka_bootstrap, new_run_id, tmp_path
):
    """A run with one engine of its own gets another one, loses the first, and is resumed so."""
    run_id = new_run_id()
    run = LaunchedRun(tmp_path, {"FORGEMQ_KAFKA": kafka_bootstrap})
    try:
        run.start(DIALOGUE, f"run={run_id}", "trainer.steps=2000", "log.lanes_max=2")
        run.wait_for_line("step 1 trained", within_s=400)
        first = run.wait_for_line(r"SGLang starts at (http://\S+)", within_s=1)[1]
        status, text = forgemq(run, "add-lane", run_id)
        assert (status, "lane 1 is added" in text) == (0, True), text
        run.wait_for_line("lane 1 is added; SGLang starts at", within_s=30)
        until_listed(run, run_id, 1, "takes requests", within_s=400)
        status, text = forgemq(run, "remove-lane", run_id, "0")
        assert status == 0, text
        run.wait_for_line("lane 0 is removed; its processes end", within_s=30)
        wait_until_gone(first)
        trained = max(map(int, re.findall(r"step (\d+) trained", run.output())))
        run.wait_for_line(f"step {trained + 3} trained", within_s=200)
        run.interrupt()
        assert run.wait_for_end(within_s=120) == 130
        assert run.left_behind() == []
        trained = max(map(int, re.findall(r"step (\d+) trained", run.output())))
        run.start(DIALOGUE, "--resume", run_id)
        run.wait_for_line("lane 0 is removed; its processes end", within_s=400)
        run.wait_for_line("lane 1 is added; SGLang starts at", within_s=30)
        until_listed(run, run_id, 1, "takes requests", within_s=400)
        run.wait_for_line(f"step {trained + 3} trained", within_s=200)
        run.interrupt()
        assert run.wait_for_end(within_s=120) == 130
        assert run.left_behind() == []
    finally:
        run.close()


def test_a_run_is_resumed_with_room_for_another_lane_and_with_no_less(
    kafka_bootstrap, base_engine_url, engine_model, new_run_id, tmp_path
):
    """Lane 1 has no partitions when the run begins; after the resume it serves."""
    run_id = new_run_id()
    second = EngineServer(
        str(engine_model), tmp_path / "second", port=free_port(), options=engine_options()
    )
    environ = {
        "FORGEMQ_KAFKA": kafka_bootstrap,
        "FORGEMQ_ENGINE_URL": base_engine_url,
        "FORGEMQ_TRAINER_FAST_PATH": "gloo-shared",
    }
    run = LaunchedRun(tmp_path / "launcher", environ)
    room = ("log.lanes_max=1", "log.keep_for_replay=true")
    try:
        second.start()
        run.start(DIALOGUE, f"run={run_id}", "trainer.steps=2000", *room)
        run.wait_for_line("step 1 trained", within_s=LANE_S_MAX)
        run.interrupt()
        assert run.wait_for_end(within_s=120) == 130
        trained = max(map(int, re.findall(r"step (\d+) trained", run.output())))
        run.start(DIALOGUE, "--resume", run_id, "log.lanes_max=2")
        run.wait_for_line("changed by this resume: log.lanes_max: 1 -> 2", within_s=60)
        run.wait_for_line(f"step {trained + 2} trained", within_s=LANE_S_MAX)
        second.wait_healthy(timeout_s=START_TIMEOUT_S)
        status, text = forgemq(run, "add-lane", run_id, "--engine", second.url)
        assert (status, "lane 1 is added" in text) == (0, True), text
        until_listed(run, run_id, 1, "takes requests", within_s=LANE_S_MAX)
        trained = max(map(int, re.findall(r"step (\d+) trained", run.output())))
        run.wait_for_line(f"step {trained + 2} trained", within_s=LANE_S_MAX)
        run.interrupt()
        assert run.wait_for_end(within_s=120) == 130
        assert run.left_behind() == []
        for change, words in (
            ("log.lanes_max=1", "log.lanes_max was 2 when"),
            ("log.group_partitions=9", "log.group_partitions was 2 when"),
        ):
            status, text = forgemq(run, "run", DIALOGUE, "--resume", run_id, change)
            assert (status, words in " ".join(text.split())) == (2, True), text
    finally:
        run.close()
        second.stop()
    asked = records_of_lanes(
        kafka_bootstrap,
        topics.REQUESTED_COMPLETIONS,
        run_id=run_id,
        blobs=str(run.blobs(run_id)),
        lanes=2,
    )
    assert {each.lane for _, each in asked} == {0, 1}


def change_the_lanes(run: LaunchedRun, run_id: str, *, added: str) -> tuple[int, int]:
    """Add lane 2 with this engine, drain lane 0, remove lane 1, resume lane 0.

    Returns:
        When the commands that drain and that remove had ended.
    """
    status, text = forgemq(run, "add-lane", run_id, "--engine", added)
    assert (status, "lane 2 is added" in text) == (0, True), text
    until_listed(run, run_id, 2, "takes requests")
    # Two of three lanes go in the middle of turns: the agents play all the time.
    status, text = forgemq(run, "drain-lane", run_id, "0")
    assert status == 0, text
    drained_ms = wall_ms()
    until_listed(run, run_id, 0, "drained")
    status, text = forgemq(run, "remove-lane", run_id, "1")
    assert status == 0, text
    removed_ms = wall_ms()
    status, text = forgemq(run, "remove-lane", run_id, "2")
    assert (status, "lane 2 is the " in text) == (2, True), text
    run.wait_for_log(run_id, "inference-1", '"event":"ended"', within_s=60)
    status, text = forgemq(run, "resume-lane", run_id, "0")
    assert status == 0, text
    until_listed(run, run_id, 0, "takes requests")
    return drained_ms, removed_ms


def refuse_bad_input(run: LaunchedRun, run_id: str) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    for arguments, words in (
        (("add-lane", run_id, "--engine", nobody), "does not answer a health check"),
        (("add-lane", run_id, "--engine", "engine:1"), "--engine must be an address such as"),
        (("add-lane", run_id, "--lane", "1"), "the run has a lane 1"),
        (("add-lane", run_id, "--lane", "3"), "log.lanes_max=3"),
        (("drain-lane", run_id, "7"), "the run has no lane '7'; it has 0, 1"),
        (("resume-lane", run_id, "0"), "lane 0 is not drained"),
        (("lanes", "another-run"), "there is no run 'another-run'"),
    ):
        status, text = forgemq(run, *arguments)
        assert (status, words in text) == (2, True), (arguments, text)


def assert_the_plan_was_kept(
    changed: list[tuple[int, RequestedLane]],
    asked: list[tuple[int, RequestedCompletion]],
    *,
    drained_ms: int,
    removed_ms: int,
) -> None:
    """Every lane served, and none was asked while it was out.

    Args:
        changed: What became of the lanes.
        asked: Every request of the run.
        drained_ms: When the command that drains lane 0 had ended.
        removed_ms: When the command that removes lane 1 had ended.
    """
    assert [(each.change, each.lane) for _, each in changed] == [
        ("add", 2),
        ("drain", 0),
        ("remove", 1),
        ("resume", 0),
    ]
    added_ms, resumed_ms = changed[0][0], changed[-1][0]
    times = {lane: [at for at, each in asked if each.lane == lane] for lane in range(3)}
    assert min(times[2]) > added_ms
    assert max(times[1]) < removed_ms + WRITTEN_MS
    assert not [at for at in times[0] if drained_ms + WRITTEN_MS < at < resumed_ms]
    assert [at for at in times[0] if at > resumed_ms]


def assert_every_request_has_its_answer(
    asked: list[tuple[int, RequestedCompletion]],
    answered: list[tuple[int, FinishedCompletion]],
    cancelled: list[tuple[int, CancelledCompletion]],
) -> None:
    """But for those that agents or the end of the run gave up; lane 2 served newer weights."""
    answers = [each for _, each in answered if each.finish_reason in ("stop", "length")]
    missing = {each.request_id for _, each in asked} - {each.request_id for each in answers}
    assert missing <= {each.request_id for _, each in cancelled}
    assert max(each.spans[-1].version for each in answers if each.lane == 2 and each.spans) > 3
