"""The commands that look at a run, on a real broker."""

import asyncio
import io
from collections.abc import Callable

import msgspec
import pytest
from rich.console import Console

from forgemq_bus.blobs import BlobStore
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_bus.log import Emit
from forgemq_contracts.messages import Output
from forgemq_contracts.run import EndedRun
from forgemq_contracts.topics import RETIRED_GROUPS
from forgemq_launcher.command_line import run_tool
from forgemq_launcher.records.run_topics import create_topics, write_end, write_start
from forgemq_launcher.run_folder import RunFolder
from forgemq_shell.records import emit_of
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
        log = KafkaLog(connection, run=run_id, blobs=BlobStore(blobs))
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
    assert "?/3" in printed


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
