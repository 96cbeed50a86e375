"""What commands say of an id for which a broker has no run, or none yet."""

import asyncio
import io
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from rich.console import Console

from forgemq_bus.kafka import KafkaConnection
from forgemq_contracts.run import StartedRun
from forgemq_launcher.dispatch import run_tool
from forgemq_launcher.records.run_log import open_run_log
from forgemq_launcher.records.run_topics import create_topics, write_start
from forgemq_launcher.run_folder import RunFolder
from forgemq_shell.clock import now_ms
from tests.unit.run_view.synthetic import started

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

Tool = Callable[..., tuple[int, str]]


@pytest.fixture
def tool(kafka_bootstrap, tmp_path) -> Tool:
    environ = {
        "FORGEMQ_LAUNCHER_RUNS": str(tmp_path / "runs"),
        "FORGEMQ_KAFKA": kafka_bootstrap,
    }

    def run(*arguments: str) -> tuple[int, str]:
        console = Console(file=io.StringIO(), width=200)
        status = run_tool(arguments, environ=environ, console=console)
        return status, console.file.getvalue()

    return run


@pytest.fixture
def begin(new_run_id, tmp_path) -> StartedRun:
    blobs = str(tmp_path / "blobs")
    return msgspec.structs.replace(started(run=new_run_id()), blobs=blobs, started_ms=now_ms())


async def start(begin: StartedRun, *, kafka: str, after_s: float = 0.0) -> None:
    await asyncio.sleep(after_s)
    connection = KafkaConnection(bootstrap=kafka)
    async with open_run_log(connection, begin.configuration, blobs=begin.blobs) as log:
        await create_topics(log, begin.configuration)
    await write_start(connection, begin)


def test_an_id_that_the_broker_does_not_know_is_answered_at_once_with_the_runs_that_it_has(
    tool, begin, kafka_bootstrap
):
    asyncio.run(start(begin, kafka=kafka_bootstrap))
    wrong = f"{begin.run}x"
    absent = f"forgemq: broker: run {wrong} has no topics on {kafka_bootstrap}: it was deleted"
    for command in ("inspect", "audit", "dlq", "replay", "stop", "watch", "resume"):
        begun_s = time.monotonic()
        status, printed = tool(command, wrong)
        assert (status, printed.startswith(absent)) == (1, True), printed
        named, *_ = printed.partition("; the broker has ")[2].rstrip().split(" and ")
        assert begin.run in named.split(", ")
        assert time.monotonic() - begun_s < 5


def test_a_run_that_a_launcher_of_this_machine_starts_is_waited_for(
    tool, begin, kafka_bootstrap, tmp_path
):
    folder = RunFolder(tmp_path / "runs" / begin.run)
    folder.make(begin.configuration)
    with folder.locked(), ThreadPoolExecutor() as threads:
        looked = threads.submit(tool, "dlq", begin.run)
        asyncio.run(start(begin, kafka=kafka_bootstrap, after_s=2.0))
        assert looked.result() == (0, "no dead letters\n")
