"""The commands that look at a run, on a real broker."""

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable

import msgspec
import pytest
from rich.console import Console

from forgemq_bus.blobs import BlobStore
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_bus.kafka_removal import RunOnBroker, kafka_removal
from forgemq_bus.kept_records import message_of, read_all
from forgemq_bus.log import Emit, Place
from forgemq_contracts.messages import Message, Output
from forgemq_contracts.partitions import group_partition
from forgemq_contracts.run import EndedRun
from forgemq_contracts.topics import (
    ADMITTED_GROUPS,
    ENDED_RUNS,
    REQUESTED_GROUPS,
    RETIRED_GROUPS,
)
from forgemq_launcher.commands.ending import wait_until_left
from forgemq_launcher.dispatch import run_tool
from forgemq_launcher.records.run_topics import create_topics, write_end, write_start
from forgemq_launcher.run_folder import RunFolder
from forgemq_run_view.report import Report
from forgemq_run_view.shown_groups import UNTRAINED_SHOWN_MAX
from forgemq_run_view.state import GroupRow
from forgemq_run_view.trajectory import Trajectory
from forgemq_shell.records import emit_of
from tests.unit.run_view.imported import imports
from tests.unit.run_view.synthetic import SyntheticRun, started

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

Tool = Callable[..., tuple[int, str]]
Put = Callable[..., None]


@pytest.fixture
def run_id(new_run_id) -> str:
    return str(new_run_id())


@pytest.fixture
def put(kafka_bootstrap, run_id, tmp_path) -> Put:
    """Writes a run of three steps, and more emits, to a broker; makes its folder."""
    connection = KafkaConnection(bootstrap=kafka_bootstrap)
    blobs = str(tmp_path / "blobs")
    begin = msgspec.structs.replace(started(run=run_id), blobs=blobs)

    async def write(emits: list[Emit]) -> None:
        log = KafkaLog(connection, run=run_id, blobs=BlobStore(blobs, run=run_id))
        try:
            await create_topics(log, begin.configuration)
            await write_start(connection, begin)
            await (await log.transaction_writer("test")).commit(
                outputs=emits, group="test", positions={}
            )
            await write_end(connection, EndedRun(run=run_id, reason="completed", ended_ms=61_000))
        finally:
            await log.close()

    def put(*others: Emit) -> None:
        run = SyntheticRun().play(steps=3)
        outputs = [
            Output(topic=m.topic, partition=m.partition, record=m.record) for m in run.messages
        ]
        asyncio.run(write([*map(emit_of, outputs), *others]))
        RunFolder(tmp_path / "runs" / run_id).make(begin.configuration)

    return put


@pytest.fixture
def tool(kafka_bootstrap, tmp_path) -> Tool:
    environ = {
        "FORGEMQ_LAUNCHER_RUNS": str(tmp_path / "runs"),
        "FORGEMQ_KAFKA": kafka_bootstrap,
        "FORGEMQ_BLOBS": str(tmp_path / "blobs"),
    }

    def run(*arguments: str) -> tuple[int, str]:
        console = Console(file=io.StringIO(), width=200)
        status = run_tool(arguments, environ=environ, console=console)
        return status, console.file.getvalue()

    return run


def test_a_sound_run_is_audited_listed_and_inspected_from_its_log(put, tool, run_id):
    put()
    status, printed = tool("audit", run_id)
    assert status == 0, printed
    assert "DID NOT HOLD" not in printed
    assert "24 samples against the log" in printed

    status, printed = tool("inspect", run_id)
    assert status == 0
    assert all(f"g-{index}" in printed for index in range(6))
    assert printed.count("trained") == 6

    status, printed = tool("inspect", run_id, "g-2")
    assert status == 0
    assert printed.count("episode g-2.") == 2
    assert printed.count("turn 0") == printed.count("turn 1") == 2
    assert "20:-0.250 30:-0.500 2:-0.125" in printed

    status, printed = tool("inspect", run_id, "g-2.1.0")
    assert (status, printed.count("episode g-2."), printed.count("turn ")) == (0, 1, 2)
    assert tool("inspect", run_id, "g-77")[0] == 1
    assert tool("dlq", run_id) == (0, "no dead letters\n")

    status, printed = tool("runs")
    assert status == 0
    assert run_id in printed
    assert "3/3" in printed


def test_audit_groups_and_turns_are_printed_as_json_and_nothing_else(put, tool, run_id):
    put()
    status, printed = tool("audit", run_id, "--json")
    audited = msgspec.json.decode(printed, type=Report)
    assert (status, printed.count("\n"), audited.run, audited.reason) == (0, 1, run_id, "completed")
    assert audited.guarantees == dict.fromkeys(("G1", "G2", "G3", "G4", "G5"), True)
    assert (audited.steps, audited.samples, audited.groups_retired) == (3, 24, {"trained": 6})

    status, printed = tool("inspect", run_id, "--json")
    rows = [msgspec.json.decode(line, type=GroupRow) for line in printed.splitlines()]
    # All were written at once, so any of them may be the oldest.
    by_id = {row.group_id: row for row in rows}
    assert (status, sorted(by_id)) == (0, [f"g-{index}" for index in range(6)])
    third = by_id["g-2"]
    assert (len(rows), third.position, third.step, third.completions) == (6, "trained", 1, 4)

    status, printed = tool("inspect", run_id, "g-2", "--json")
    episodes = [msgspec.json.decode(line, type=Trajectory) for line in printed.splitlines()]
    assert (status, [each.episode_id for each in episodes]) == (0, ["g-2.0.0", "g-2.1.0"])
    assert [len(each.turns) for each in episodes] == [2, 2]
    first = episodes[0].turns[0]
    assert (first.output, first.logprobs) == ((20, 30, 2), (-0.25, -0.5, -0.125))
    assert tool("inspect", run_id, "g-2.1.0", "--json") == (0, printed.splitlines()[1] + "\n")


def test_a_group_that_is_older_than_those_that_a_list_shows_is_inspected(put, tool, run_id):
    partitions = started().configuration.log.group_partitions
    oldest, by_queue = "i-0", (REQUESTED_GROUPS.name, ADMITTED_GROUPS.name)

    def emit(message: Message) -> Emit:
        partition = group_partition(message.record.group_id, partitions=partitions)
        partition = 0 if message.topic in by_queue else partition
        output = Output(topic=message.topic, partition=partition, record=message.record)
        return emit_of(output)

    put(*map(emit, imports(UNTRAINED_SHOWN_MAX + 1, outcomes=0)))
    status, printed = tool("inspect", run_id, oldest)
    assert (status, "user (imported)\n2 + 2?\n" in printed) == (0, True)
    said = f"forgemq: there is no turn of '{oldest}.7'; its group has turns of {oldest}.0.0\n"
    assert tool("inspect", run_id, f"{oldest}.7") == (1, said)


def test_a_guarantee_that_is_broken_and_a_dead_letter_are_shown_by_status_one(put, tool, run_id):
    again = next(SyntheticRun().play(steps=3).of(RETIRED_GROUPS))
    put(
        emit_of(Output(topic=again.topic, partition=again.partition, record=again.record)),
        Emit(
            topic=RETIRED_GROUPS.dlq_name,
            partition=0,
            key=b"g",
            value=b"not a record",
            headers=(("reason", b"it does not decode"),),
        ),
    )
    status, printed = tool("audit", run_id)
    assert status == 1
    assert "was retired 2 times" in printed
    status, printed = tool("dlq", run_id)
    assert status == 1
    assert "it does not decode" in printed
    assert "not a record" in printed


def test_a_run_that_another_machine_started_is_looked_at_from_its_log_and_blobs_alone(
    put, kafka_bootstrap, run_id, tmp_path
):
    put()
    empty = tmp_path / "another-machine"
    environ = {"FORGEMQ_KAFKA": kafka_bootstrap, "FORGEMQ_LAUNCHER_RUNS": str(empty / "runs")}

    def look(*arguments: str) -> tuple[int, str]:
        console = Console(file=io.StringIO(), width=200)
        return run_tool(arguments, environ=environ, console=console), console.file.getvalue()

    status, printed = look("audit", run_id)
    assert (status, "24 samples against the log" in printed) == (0, True), printed
    status, printed = look("inspect", run_id)
    assert (status, printed.count("trained")) == (0, 6)
    status, printed = look("inspect", run_id, "g-2")
    assert (status, "20:-0.250 30:-0.500 2:-0.125" in printed) == (0, True)
    assert look("dlq", run_id) == (0, "no dead letters\n")
    status, printed = look("runs")
    (row,) = [line for line in printed.splitlines() if run_id in line]
    cells = [cell.strip() for cell in row.split("\u2502")[1:-1]]
    assert (status, cells[:5]) == (0, [run_id, "completed", "3/3", "-", "-"])
    assert look("report", run_id, "--to", str(empty / "report"))[0] == 0
    report = json.loads((empty / "report" / "report.json").read_text())
    assert (report["run"], report["steps"], report["reason"]) == (run_id, 3, "completed")
    assert (empty / "report" / "report.png").stat().st_size > 0
    assert [
        json.loads(line)["step"]
        for line in (empty / "report" / "curves.jsonl").read_text().splitlines()
    ] == [0, 1, 2]
    assert not (empty / "runs").exists()


def test_a_run_is_deleted_with_its_topics_groups_blobs_and_folder_and_no_other_run(
    put, tool, kafka_bootstrap, run_id, tmp_path
):
    put()
    other = f"{run_id}x"
    connection = KafkaConnection(bootstrap=kafka_bootstrap)

    async def prepare() -> None:
        log = KafkaLog(connection, run=other)
        await log.create_topics({RETIRED_GROUPS.name: 1})
        await log.close()
        log = KafkaLog(connection, run=run_id)
        writer = await log.transaction_writer("test")
        await writer.commit(outputs=(), group="test", positions={Place(RETIRED_GROUPS.name, 0): 1})
        await log.close()
        for run in (run_id, other):
            await BlobStore(str(tmp_path / "blobs"), run=run).put(b"kept elsewhere")

    async def there() -> dict[str, RunOnBroker]:
        async with kafka_removal(connection) as removal:
            return {run: await removal.find(run) for run in (run_id, other)}

    asyncio.run(prepare())
    before = asyncio.run(there())
    assert f"{run_id}.test" in before[run_id].groups
    status, printed = tool("delete", run_id)
    assert status == 2
    assert "nothing was removed; --yes removes without asking" in printed
    assert asyncio.run(there()) == before

    status, printed = tool("delete", run_id, "--yes")
    assert status == 0, printed
    assert f"removed topic {run_id}.retired-groups-v1\n" in printed
    assert f"removed consumer group {run_id}.test\n" in printed
    assert f"removed its blobs and weights in {tmp_path / 'blobs'} (14 bytes)" in printed
    after = asyncio.run(there())
    assert after[run_id] == RunOnBroker(topics=(), groups=(), joined=())
    assert after[other] == before[other]
    assert [path.name for path in (tmp_path / "blobs" / "values").iterdir()] == [other]
    assert list((tmp_path / "runs").iterdir()) == []
    status, printed = tool("delete", run_id, "--yes")
    assert (status, f"run {run_id} has nothing on" in printed) == (2, True)


def test_a_run_whose_services_are_up_on_the_broker_is_not_deleted(
    put, tool, kafka_bootstrap, run_id
):
    put()

    async def delete_while_joined() -> tuple[int, str]:
        async def nothing(_: frozenset[int]) -> None:
            pass

        log = KafkaLog(KafkaConnection(bootstrap=kafka_bootstrap), run=run_id)
        try:
            await log.member(
                group="reward",
                topics=[RETIRED_GROUPS.name],
                on_assigned=nothing,
                on_revoked=nothing,
            )
            return await asyncio.to_thread(tool, "delete", run_id, "--yes")
        finally:
            await log.close()

    status, printed = asyncio.run(delete_while_joined())
    assert status == 2
    assert f"{run_id}.reward have members; stop its services first" in printed
    assert tool("audit", run_id)[0] == 0


def test_a_run_that_is_played_is_ended_once_and_reported_each_time(
    put, tool, run_id, kafka_bootstrap, tmp_path
):
    """The first of two pods ends it, after a start that follows an earlier end."""
    put()
    blobs, connection = str(tmp_path / "blobs"), KafkaConnection(bootstrap=kafka_bootstrap)
    resumed = msgspec.structs.replace(started(run=run_id), blobs=blobs, started_ms=70_000)
    asyncio.run(write_start(connection, resumed))
    arguments = ("end", run_id, "--to", str(tmp_path / "report"))
    printed = [tool(*arguments) for _ in range(2)]
    assert [status for status, _ in printed] == [0, 0]
    assert [f"waiting until run {run_id} is played" in text for _, text in printed] == [True, False]

    async def ends() -> list[EndedRun]:
        log = KafkaLog(connection, run=run_id)
        found = [Place(ENDED_RUNS.name, 0)]
        try:
            written = [
                message_of(record).record
                async for records in read_all(log, found)
                for record in records
            ]
        finally:
            await log.close()
        return [each for each in written if isinstance(each, EndedRun) and each.run == run_id]

    _, ended = asyncio.run(ends())
    assert ended.reason == "completed"
    assert {each.name: each.value for each in ended.results if each.name.startswith("G")} == (
        dict.fromkeys(("G1", "G2", "G3", "G4", "G5"), 1.0)
    )
    report = json.loads((tmp_path / "report" / "report.json").read_bytes())
    assert (report["run"], report["reason"], report["steps"]) == (run_id, "completed", 3)
    assert len((tmp_path / "report" / "curves.jsonl").read_text().splitlines()) == 3


def test_a_run_that_is_over_is_shown_by_its_last_line_and_the_status_it_ended_with(
    put, tool, run_id
):
    put()
    status, printed = tool("watch", run_id)
    assert (status, "step 3/3 success" in printed) == (0, True), printed
    assert f"run {run_id} is completed" in printed
    assert tool("stop", run_id) == (0, f"run {run_id} is over: completed\n")
    refusal = f"forgemq: run {run_id} is completed: there is nothing left to play\n"
    assert tool("resume", run_id) == (2, refusal)


def test_a_run_without_a_launcher_that_is_asked_to_end_is_ended_and_reported_as_interrupted(
    put, tool, run_id, kafka_bootstrap, tmp_path
):
    """Its newest start has one step to train; `forgemq end` waits in a process of its own."""
    put()
    blobs, begun = str(tmp_path / "blobs"), started(run=run_id, steps=4)
    begun = msgspec.structs.replace(begun, blobs=blobs, started_ms=70_000)
    asyncio.run(write_start(KafkaConnection(bootstrap=kafka_bootstrap), begun))
    ending = subprocess.Popen(
        [sys.executable, "-m", "forgemq_launcher", "end", run_id, "--to", str(tmp_path / "report")],
        env={**os.environ, "FORGEMQ_KAFKA": kafka_bootstrap, "FORGEMQ_BLOBS": blobs},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert ending.stdout.readline() == f"waiting until run {run_id} is played\n"
        stopped = tool("stop", run_id, "--reason", "enough")
        printed, _ = ending.communicate(timeout=60)
    finally:
        ending.kill()
    assert stopped == (0, f"run {run_id} is asked to end\nrun {run_id} has ended: interrupted\n")
    assert (ending.returncode, "asked to end by `forgemq stop`: enough" in printed) == (0, True)
    report = json.loads((tmp_path / "report" / "report.json").read_bytes())
    assert (report["run"], report["reason"], report["steps"]) == (run_id, "interrupted", 3)
    assert tool("watch", run_id)[0] == 130
    resumed = f"run {run_id} is announced again, behind step 2: start its services\n"
    assert tool("resume", run_id) == (0, resumed)
    assert "has not ended within 0.1 s" in tool("stop", run_id, "--timeout", "0.1")[1]
    assert "has not ended: start its services" in tool("resume", run_id)[1]


async def test_the_end_of_a_stopped_run_waits_for_its_services_and_not_for_its_console(
    kafka_bootstrap, run_id
):
    connection = KafkaConnection(bootstrap=kafka_bootstrap)
    console, service = (KafkaLog(connection, run=run_id) for _ in range(2))

    async def join(log: KafkaLog, group: str) -> None:
        async def nothing(_: frozenset[int]) -> None:
            pass

        topics = [RETIRED_GROUPS.name]
        await log.member(group=group, topics=topics, on_assigned=nothing, on_revoked=nothing)

    await console.create_topics({RETIRED_GROUPS.name: 1})
    try:
        await join(console, "console-1")
        await join(service, "reward")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                await wait_until_left(connection, run_id)
        await service.close()
        async with asyncio.timeout(20):
            await wait_until_left(connection, run_id)
    finally:
        await service.close()
        await console.close()
