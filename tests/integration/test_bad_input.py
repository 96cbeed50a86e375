"""Bad records during a run, and starts that cannot work: one clear message, no process left."""

import asyncio
import json
import re
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_bus.kept_records import message_of, read_all
from forgemq_bus.log import Emit, Headers, Place, Record
from forgemq_contracts import topics
from forgemq_contracts.groups import AdmittedGroup
from forgemq_contracts.partitions import group_partition
from forgemq_contracts.run import EndedRun
from forgemq_shell.dead_letters import letter_of
from tests.integration.launched_run import DIALOGUE, FORGEMQ, ROOT, LaunchedRun
from tests.integration.run_log import GROUP_PARTITIONS, accounts, records_of
from tests.integration.stand_in import stand_in_engine

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 6
TORN = b"\xc1 torn"
BROKEN_RULE = msgspec.msgpack.encode({"group_id": "g-1", "domain": "dialogue", "purpose": "sleep"})
REQUEST_ID = "0" * 32
SCRAPED = {"FORGEMQ_TELEMETRY_EXPORTER": "prometheus", "FORGEMQ_TELEMETRY_PORT": "0"}
"""Metrics at ports that are free."""


@dataclass(frozen=True)
class BadRecord:
    """A bad record that the test wrote, and the group that it names."""

    group_id: str
    emit: Emit
    offset: int


def torn_episode(group_id: str) -> Emit:
    """An episode whose bytes are torn; its key names the group. Five readers meet it."""
    return bad_emit(topics.FINISHED_EPISODES, group_id, key=f"{group_id}.0.0", value=TORN)


def broken_score(group_id: str) -> Emit:
    """A score in valid MessagePack that breaks a rule; its bytes and key name different groups."""
    return bad_emit(topics.SCORED_GROUPS, group_id, key=group_id, value=BROKEN_RULE)


def torn_completion(group_id: str) -> Emit:
    """A completion whose bytes are torn. Its key is a request id; a header names the group."""
    header = ("group", group_id.encode())
    return bad_emit(
        topics.FINISHED_COMPLETIONS, group_id, key=REQUEST_ID, value=TORN, headers=(header,)
    )


def completion_of_no_tokens(group_id: str) -> Emit:
    """A completion whose arrays do not fit together: unchecked, it would end every reader."""
    record = {
        "request_id": REQUEST_ID,
        "attempt": 0,
        "episode_id": f"{group_id}.0.0",
        "group_id": group_id,
        "lane": 0,
        "epoch": 1,
        "finish_reason": "stop",
        "turn": {"sequence": 0, "protocol": "chat_completions", "body_digest": "d"},
        "context": b"abc",
        "output": b"\x01\x00\x00\x00",
    }
    value = msgspec.msgpack.encode(record)
    return bad_emit(topics.FINISHED_COMPLETIONS, group_id, key=REQUEST_ID, value=value)


def bad_emit(
    topic: topics.Topic, group_id: str, *, key: str, value: bytes, headers: Headers = ()
) -> Emit:
    partition = group_partition(group_id, partitions=GROUP_PARTITIONS)
    return Emit(
        topic=topic.name, partition=partition, key=key.encode(), value=value, headers=headers
    )


SPOILERS = (torn_episode, broken_score, torn_completion, completion_of_no_tokens)


async def spoil_groups(kafka: str, run_id: str) -> list[BadRecord]:
    """Write one bad record for each of the next groups that get a slot, while they are played."""
    log = KafkaLog(KafkaConnection(bootstrap=kafka), run=run_id)
    try:
        writer = await log.writer()
        spoiled = []
        async for group_id in _next_admitted(log, count=len(SPOILERS)):
            emit = SPOILERS[len(spoiled)](group_id)
            spoiled.append(BadRecord(group_id, emit, await writer.write(emit)))
        return spoiled
    finally:
        await log.close()


async def _next_admitted(log: KafkaLog, *, count: int):
    place = Place(topics.ADMITTED_GROUPS.name, 0)
    reader = await log.reader(await log.end_positions([place]))
    while count:
        for record in await reader.read(timeout_s=1.0, records_max=1):
            group = topics.decode(topics.ADMITTED_GROUPS, record.value)
            assert isinstance(group, AdmittedGroup)
            if group.purpose == "train":
                count -= 1
                yield group.group_id
    await reader.close()


async def dead_letters(kafka: str, run_id: str) -> list[Record]:
    """All records of the run's dead letter topics."""
    log = KafkaLog(KafkaConnection(bootstrap=kafka), run=run_id)
    try:
        return [
            record
            for topic in topics.OF_RUN
            if topic.has_dlq
            for record in await records_of(log, topic.dlq_name, partitions=1)
        ]
    finally:
        await log.close()


def told(run: LaunchedRun, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Output of a `forgemq` command about an ended run."""
    return subprocess.run(
        [str(FORGEMQ), *arguments],
        cwd=ROOT,
        env={**run.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_bad_records_become_dead_letters_and_cost_their_groups_only(
    kafka_bootstrap, new_run_id, tmp_path
):
    run_id = new_run_id()
    with stand_in_engine(latency_s=0.7, tokens=16) as engine_url:
        environ = {"FORGEMQ_KAFKA": kafka_bootstrap, "FORGEMQ_ENGINE_URL": engine_url}
        run = LaunchedRun(tmp_path, environ)
        try:
            overrides = (f"trainer.steps={STEPS}", "evaluation.tasks=0", "log.keep_for_replay=true")
            run.start(DIALOGUE, f"run={run_id}", *overrides)
            run.wait_for_line("step 0 trained", within_s=180)
            spoiled = asyncio.run(spoil_groups(kafka_bootstrap, run_id))
            run.wait_for_end(within_s=240)
            assert run.left_behind() == []
        finally:
            run.close()

    assert "restarting" not in run.output()
    letters = asyncio.run(dead_letters(kafka_bootstrap, run_id))
    assert len(letters) == len(spoiled), "one dead letter for each bad record"
    sources = [letter_of(letter) for letter in letters]
    by_source = {
        (source.topic, source.partition, source.offset): letter
        for source, letter in zip(sources, letters, strict=True)
    }
    for bad in spoiled:
        letter = by_source[bad.emit.topic, bad.emit.partition, bad.offset]
        headers = dict(letter.headers)
        assert (letter.key, letter.value) == (bad.emit.key, bad.emit.value)
        assert headers["reason"].startswith(b"does not decode: ")
        assert headers["topic"] == bad.emit.topic.encode()
        assert headers["partition"] == str(bad.emit.partition).encode()
        assert headers["group"] == bad.group_id.encode()

    log = accounts(
        kafka_bootstrap,
        run=run_id,
        blobs=str(run.blobs(run_id)),
        bad=frozenset((bad.emit.place, bad.offset) for bad in spoiled),
    )
    log.assert_exactly_once()
    assert len(log.surviving_steps()) == STEPS
    failed = {group.group_id: group.detail for group in log.retired if group.reason == "failed"}
    assert set(failed) == {bad.group_id for bad in spoiled}
    for bad in spoiled:
        assert f"{bad.emit.topic} at offset {bad.offset} is no record" in failed[bad.group_id]
    shown = told(run, "dlq", run_id)
    assert shown.returncode == 1
    assert "finished-episodes-v1" in shown.stdout
    assert "scored-groups-v1" in shown.stdout
    assert "finished-completions-v1" in shown.stdout
    replayed = told(run, "replay", run_id)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


def test_a_run_whose_agent_always_fails_ends_and_says_why(kafka_bootstrap, new_run_id, tmp_path):
    """Twelve groups fail in a row, three for each of the four slots, and none trains."""
    run_id = new_run_id()
    with stand_in_engine(latency_s=0.1, tokens=4) as engine_url:
        environ = {"FORGEMQ_KAFKA": kafka_bootstrap, "FORGEMQ_ENGINE_URL": engine_url, **SCRAPED}
        run = LaunchedRun(tmp_path, environ)
        try:
            overrides = ("queues.0.agent=dialogue:play_badly", "evaluation.tasks=0")
            run.start(DIALOGUE, f"run={run_id}", *overrides)
            assert run.wait_for_end(within_s=180) == 1
            assert run.left_behind() == []
        finally:
            run.close()
    assert "Traceback" not in run.output()
    assert "restarting" not in run.output()
    [said] = [line for line in run.output().splitlines() if "failed in a row" in line]
    assert re.search(
        r"\d+ groups of dialogue failed in a row, the limit is 12 "
        r"\(FORGEMQ_LAUNCHER_GROUPS_FAILED_MAX\); the newest, g-\w+, failed: "
        r"0 of 4 episodes scored, 2 are needed; g-\w+\.0\.\d: ValueError: out of words$",
        said,
    )
    log = accounts(kafka_bootstrap, run=run_id, blobs=str(run.blobs(run_id)))
    assert {group.reason for group in log.retired} == {"failed"}
    assert not log.trained
    assert [each["labels"]["ended"] for each in targets(run, run_id)] == ["failed"]


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port of this machine that is taken by another listener."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


@pytest.fixture
def refused_run(kafka_bootstrap, new_run_id, tmp_path) -> Iterator[LaunchedRun]:
    """A run on the session's broker; each test starts it with a setting that cannot work."""
    run = LaunchedRun(tmp_path, {"FORGEMQ_KAFKA": kafka_bootstrap})
    yield run
    run.close()


def targets(run: LaunchedRun, run_id: str) -> list[dict[str, Any]]:
    """What Prometheus finds of the run."""
    path = run.runs / "scrape_targets" / f"{run_id}.json"
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


async def ends_of(bootstrap: str, run_id: str) -> list[EndedRun]:
    """Every end of a run that is on the log, oldest first."""
    log = KafkaLog(KafkaConnection(bootstrap=bootstrap), run="")
    try:
        batches = [batch async for batch in read_all(log, [Place(topics.ENDED_RUNS.name, 0)])]
    finally:
        await log.close()
    ends = [message_of(record).record for batch in batches for record in batch]
    return [end for end in ends if isinstance(end, EndedRun) and end.run == run_id]


def refusal(run: LaunchedRun, run_id: str, **settings: str) -> str:
    """Last line of a start with these settings, which fails with 1 and leaves no process."""
    run.start(DIALOGUE, f"run={run_id}", environ=settings)
    assert run.wait_for_end(within_s=120) == 1
    assert run.left_behind() == []
    assert "Traceback" not in run.output()
    lines = [line for line in run.output().splitlines() if " s  " in line]
    said = [line.split(" s  ", 1)[1] for line in lines if "continue with" not in line]
    return said[-1]


def test_a_taken_port_is_named_and_ends_the_run_on_the_log(
    kafka_bootstrap, refused_run, new_run_id, taken_port
):
    run_id = new_run_id()
    said = refusal(
        refused_run,
        run_id,
        FORGEMQ_ENGINE_URL="http://127.0.0.1:1",
        FORGEMQ_LAUNCHER_GATEWAY_PORT=str(taken_port),
        **SCRAPED,
    )
    assert said == f"port {taken_port} of 127.0.0.1 is taken: free it or choose another"
    [ended] = asyncio.run(ends_of(kafka_bootstrap, run_id))
    assert (ended.reason, ended.detail) == ("failed", said)
    assert [each["labels"]["ended"] for each in targets(refused_run, run_id)] == ["failed"]


def test_a_named_engine_that_is_not_there_is_said_at_once_and_given_up_in_time(
    refused_run, new_run_id
):
    said = refusal(
        refused_run,
        new_run_id(),
        FORGEMQ_ENGINE_URL="http://127.0.0.1:1",
        FORGEMQ_LAUNCHER_START_TIMEOUT_S="4",
    )
    assert re.fullmatch(
        r"engine 0 at http://127.0.0.1:1 did not answer for \d s \(Connection refused\): start it, "
        "or unset FORGEMQ_ENGINE_URL for a run that brings its own",
        said,
    )
    assert "does not answer (Connection refused); waiting up to 4 s for it" in refused_run.output()


def test_an_engine_that_does_not_come_up_in_time_is_given_up_with_its_log(refused_run, new_run_id):
    said = refusal(refused_run, new_run_id(), FORGEMQ_LAUNCHER_START_TIMEOUT_S="2")
    assert re.fullmatch(r"the engine on port \d+ did not answer /health within 2 s; .*:", said)


def test_too_little_memory_is_said_in_bytes(refused_run, new_run_id):
    said = refusal(refused_run, new_run_id(), FORGEMQ_LAUNCHER_MEMORY_MIN_BYTES=str(10**15))
    assert re.match(r"failed: too little memory: \S+ GB are free, a run needs 1000000.0 GB", said)
