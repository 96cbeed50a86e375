"""The run's own broker while a signal comes, and while it dies."""

import asyncio
import io
import json
import socket
import time

import msgspec
import psutil
import pytest
from rich.console import Console

from forgemq_bus.broker import LocalBroker
from forgemq_launcher.core.restarts import RestartPolicy
from forgemq_launcher.dispatch import run_tool
from forgemq_launcher.run_folder import RunFolder
from forgemq_launcher.upkeep.broker import RunBroker
from tests.small_run import small_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


async def test_a_signal_during_the_start_is_noticed_at_once_and_leaves_no_process(tmp_path):
    before = set(psutil.Process().children(recursive=True))
    broker = RunBroker(tmp_path / "kafka", environ={}, note=lambda _: None)
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.3, stop.set)
    started_s = time.monotonic()
    assert not await broker.start(stop=stop)
    assert time.monotonic() - started_s < 2
    await broker.stop()
    assert set(psutil.Process().children(recursive=True)) <= before


async def test_a_start_that_nothing_interrupts_gives_an_address(tmp_path):
    broker = RunBroker(tmp_path / "kafka", environ={}, note=lambda _: None)
    try:
        assert await broker.start(stop=asyncio.Event())
        assert broker.connection.bootstrap.startswith("127.0.0.1:")
    finally:
        await broker.stop()


@pytest.mark.parametrize("command", ["inspect", "replay"])
def test_a_run_that_ended_before_it_was_announced_is_named_with_what_to_do(tmp_path, command):
    made = msgspec.structs.replace(small_run(group_partitions=1), run="early-1")
    folder = RunFolder(tmp_path / "early-1")
    folder.make(made)
    broker = LocalBroker(folder / "kafka")
    broker.start()
    broker.stop()
    console = Console(file=io.StringIO(), width=200)
    environ = {"FORGEMQ_LAUNCHER_RUNS": str(tmp_path)}
    status = run_tool((command, "early-1"), environ=environ, console=console)
    assert (status, console.file.getvalue()) == (
        2,
        "forgemq: run early-1 ended before it was announced, so nothing is on its log: "
        "forgemq run FILE --resume early-1 plays it, forgemq delete early-1 removes it\n",
    )


async def test_a_broker_that_cannot_start_again_is_started_once_more(tmp_path):
    notes: list[str] = []
    broker = RunBroker(tmp_path / "kafka", environ={}, note=notes.append)
    before = set(psutil.Process().children(recursive=True))
    keeping = None
    try:
        assert await broker.start()
        (kafka,) = (
            each
            for each in set(psutil.Process().children(recursive=True)) - before
            if each.name() == "java"
        )
        ports = json.loads((tmp_path / "kafka/ports.json").read_text())
        keeping = asyncio.ensure_future(broker.keep(policy=RestartPolicy(), note=notes.append))
        kafka.kill()
        kafka.wait(10)
        with socket.create_server(("127.0.0.1", ports["controller"])):
            async with asyncio.timeout(60):
                while not any(each.startswith("Kafka did not start") for each in notes):  # noqa: ASYNC110 - a note has no event
                    await asyncio.sleep(0.05)
        async with asyncio.timeout(60):
            while not accepts(ports["broker"]):  # noqa: ASYNC110 - a process has no event
                await asyncio.sleep(0.05)
        assert not keeping.done()
    finally:
        if keeping is not None:
            keeping.cancel()
        await broker.stop()


def accepts(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
