"""The local broker's life: restarts, a killed owner, the foreground program."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forgemq_bus.broker import BrokerError, LocalBroker
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_bus.kafka_connection import REQUEST_TIMEOUT_MS
from forgemq_bus.log import Emit, Place

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

PLACE = Place("a", 0)
OWNER = """
import sys, time
from pathlib import Path
from forgemq_bus.broker import LocalBroker
print(LocalBroker(Path(sys.argv[1])).start(), flush=True)
time.sleep(60)
"""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[LocalBroker]:
    broker = LocalBroker(tmp_path / "kafka")
    yield broker
    broker.stop()


def accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


def gone_within(address: str, timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while accepts(address):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.1)
    return True


async def write(log: KafkaLog, value: bytes) -> int:
    writer = await log.writer()
    try:
        return await writer.write(Emit(topic="a", partition=0, key=b"", value=value))
    finally:
        await writer.close()


async def test_a_restart_has_the_same_address_and_records_and_clients_carry_on(
    broker: LocalBroker,
) -> None:
    address = await asyncio.to_thread(broker.start)
    log = KafkaLog(KafkaConnection(bootstrap=address), run="r")
    await log.create_topics({"a": 1})
    reader, writer = await log.reader({PLACE: 0}), await log.writer()
    transactions = await log.transaction_writer("t")
    await writer.write(Emit(topic="a", partition=0, key=b"", value=b"before"))
    await transactions.commit(outputs=[], group="g", positions={PLACE: 1})

    await asyncio.to_thread(broker.stop)
    assert not accepts(address)
    assert await asyncio.to_thread(broker.start) == address

    assert await writer.write(Emit(topic="a", partition=0, key=b"", value=b"after")) == 1
    outputs = [Emit(topic="a", partition=0, key=b"", value=b"in a transaction")]
    await transactions.commit(outputs=outputs, group="g", positions={PLACE: 2})
    values: list[bytes] = []
    while len(values) < 3:
        values += [item.value for item in await reader.read(timeout_s=5.0, records_max=9)]
    assert values == [b"before", b"after", b"in a transaction"]
    assert await log.committed(group="g", places=[PLACE]) == {PLACE: 2}
    await log.close()


@pytest.mark.slow
async def test_what_was_acknowledged_survives_a_killed_broker(broker: LocalBroker) -> None:
    address = await asyncio.to_thread(broker.start)
    log = KafkaLog(KafkaConnection(bootstrap=address), run="r")
    await log.create_topics({"a": 1})
    assert await write(log, b"kept") == 0
    broker.kill()
    restarted = asyncio.ensure_future(asyncio.to_thread(broker.start))
    assert await write(log, b"waited for it") == 1
    assert await restarted == address
    assert await log.end_positions([PLACE]) == {PLACE: 2}
    await log.close()


@pytest.mark.slow
async def test_positions_are_asked_for_as_long_as_the_connection_says(broker: LocalBroker) -> None:
    """Longer than one request, which is what a busy machine may take for its first answers."""
    address = await asyncio.to_thread(broker.start)
    log = KafkaLog(KafkaConnection(bootstrap=address, retry_s=90.0), run="r")
    await log.create_topics({"a": 1})
    assert await write(log, b"kept") == 0
    assert await log.end_positions([PLACE]) == {PLACE: 1}
    broker.kill()
    asked = [
        asyncio.ensure_future(log.first_positions([PLACE])),
        asyncio.ensure_future(log.end_positions([PLACE])),
    ]
    await asyncio.sleep(REQUEST_TIMEOUT_MS / 1000 + 1)
    assert [each.done() for each in asked] == [False, False]
    await asyncio.to_thread(broker.start)
    assert await asyncio.gather(*asked) == [{PLACE: 0}, {PLACE: 1}]
    await log.close()


async def test_clients_start_while_the_cluster_names_no_broker(tmp_path: Path) -> None:
    # It is fenced for two of three seconds, as a broker that stands still for a while.
    options = {"broker.session.timeout.ms": "1000", "broker.heartbeat.interval.ms": "3000"}
    broker = LocalBroker(tmp_path / "kafka", options=options)
    log = KafkaLog(KafkaConnection(bootstrap=await asyncio.to_thread(broker.start)), run="r")
    try:
        for number in range(8):
            writer = await log.transaction_writer(f"w{number}")
            await writer.close()
            await asyncio.sleep(0.35)
    finally:
        await log.close()
        await asyncio.to_thread(broker.stop)


def test_starting_twice_is_refused(broker: LocalBroker, tmp_path: Path) -> None:
    broker.start()
    with pytest.raises(BrokerError, match="already running"):
        broker.start()
    with pytest.raises(BrokerError, match="is in use"):
        LocalBroker(tmp_path / "kafka").start()


def test_a_broker_that_cannot_start_says_why_in_one_line(tmp_path: Path) -> None:
    broker = LocalBroker(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "meta.properties").write_text("version=1\nnode.id=99\ncluster.id=x\n")
    with pytest.raises(
        BrokerError, match=r"Kafka ended with code 1: .*Stored node id 99"
    ) as raised:
        broker.start()
    assert "\n" not in str(raised.value)
    assert not broker.is_running()


def test_a_broker_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        address = owner.stdout.readline().strip()
        assert accepts(address)
        owner.kill()
    assert gone_within(address, 10.0)


def test_the_foreground_program_prints_its_address_and_ends_cleanly_on_sigterm(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "forgemq_bus.broker", "--folder", str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as program:
        assert program.stdout is not None
        address = program.stdout.readline().strip()
        assert accepts(address)
        os.kill(program.pid, signal.SIGTERM)
        assert program.wait(15) == 0
    assert not accepts(address)


def test_the_log_lies_in_the_folder_whatever_its_name_and_the_locale(tmp_path: Path) -> None:
    folder = tmp_path / "l\u00e4ufe, \u65e5\\n" / "kafka"
    command = [sys.executable, "-m", "forgemq_bus.broker", "--folder", str(folder)]
    environ = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "1"}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert accepts(program.stdout.readline().strip())
        os.kill(program.pid, signal.SIGTERM)
        assert program.wait(15) == 0
    assert [each.name for each in tmp_path.iterdir()] == [folder.parent.name]
    assert [each.name for each in folder.parent.iterdir()] == ["kafka"]
    assert (folder / "data" / "meta.properties").is_file()
