"""How often a reader asks its broker while nothing or much comes, and how soon it has a record."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_bus.kafka_reader import (
    BUSY_S,
    FETCH_WAIT_QUIET_MS_MAX,
    PROBE_AFTER_S,
    QUIET_AFTER_S,
)
from forgemq_bus.log import Emit, Member, Place, Reader

pytestmark = pytest.mark.integration

A0, A1 = Place("a", 0), Place("a", 1)
ONE_WAIT_S = FETCH_WAIT_QUIET_MS_MAX / 1000


@pytest.fixture
async def log(kafka_bootstrap: str, new_run_id: Callable[[], str]) -> AsyncIterator[KafkaLog]:
    log = KafkaLog(KafkaConnection(bootstrap=kafka_bootstrap), run=new_run_id())
    await log.create_topics({"a": 2})
    yield log
    await log.close()


async def read_nothing(reader: Reader, *, for_s: float) -> None:
    until_s = time.monotonic() + for_s
    while time.monotonic() < until_s:
        assert await reader.read(timeout_s=0.25, records_max=10) == []


@asynccontextmanager
async def requests_sent(caplog: pytest.LogCaptureFixture) -> AsyncIterator[list[str]]:
    """What aiokafka sends meanwhile, filled in at the end: the names of the requests."""
    names: list[str] = []
    with caplog.at_level(logging.DEBUG, logger="aiokafka.conn"):
        caplog.clear()
        yield names
    sent = [record for record in caplog.records if record.msg.startswith("Request to")]
    names += [type(record.args[-1]).__name__ for record in sent if isinstance(record.args, tuple)]


async def test_a_quiet_reader_asks_once_in_two_seconds_and_nothing_else(
    log: KafkaLog, caplog: pytest.LogCaptureFixture
) -> None:
    reader = await log.reader({A0: 0, A1: 0})
    await read_nothing(reader, for_s=QUIET_AFTER_S + 1)
    async with requests_sent(caplog) as names:
        await read_nothing(reader, for_s=PROBE_AFTER_S)
    assert {name.partition("_")[0] for name in names} == {"FetchRequest"}
    assert len(names) <= 6  # With the short wait: 40.


async def test_a_reader_with_a_paused_partition_keeps_to_the_short_wait(log: KafkaLog) -> None:
    writer = await log.writer()
    reader = await log.reader({A0: 0, A1: 0})
    reader.pause([A1])
    await writer.write(Emit(topic="a", partition=1, key=b"", value=b"waits"))
    await read_nothing(reader, for_s=QUIET_AFTER_S + 1)
    reader.resume([A1])
    began_s = time.monotonic()
    (record,) = await reader.read(timeout_s=5.0, records_max=10)
    assert record.value == b"waits"
    assert time.monotonic() - began_s < ONE_WAIT_S / 2


async def test_a_quiet_reader_gets_what_a_transaction_wrote_at_once(log: KafkaLog) -> None:
    writer = await log.transaction_writer("t")
    reader = await log.reader({A0: 0, A1: 0})
    await read_nothing(reader, for_s=QUIET_AFTER_S + 1)
    reading = asyncio.ensure_future(reader.read(timeout_s=5.0, records_max=10))
    await asyncio.sleep(0.1)
    emit = Emit(topic="a", partition=1, key=b"", value=b"x")
    await writer.commit(outputs=[emit], group="g", positions={A0: 0})
    began_s = time.monotonic()
    (record,) = await reading
    assert record.value == b"x"
    assert time.monotonic() - began_s < ONE_WAIT_S / 4


async def member_of(log: KafkaLog) -> Member:
    async def ignore(_: frozenset[int]) -> None:
        """Nothing has to be done."""

    return await log.member(group="g", topics=["a"], on_assigned=ignore, on_revoked=ignore)


async def read_while_written(log: KafkaLog, reader: Reader, *, records: int) -> list[int]:
    """How many records each read returned, while one is written every few milliseconds."""
    writer = await log.writer()

    async def write_all() -> None:
        for _ in range(records):
            await writer.write(Emit(topic="a", partition=0, key=b"", value=b"x"))

    writing = asyncio.ensure_future(write_all())
    counts: list[int] = []
    while sum(counts) < records:
        counts.append(len(await reader.read(timeout_s=5.0, records_max=records)))
    await writing
    return counts


async def test_a_member_gets_many_records_at_once_while_they_keep_coming(log: KafkaLog) -> None:
    gathered = await read_while_written(log, await member_of(log), records=300)
    (end,) = (await log.end_positions([A0])).values()
    alone = await read_while_written(log, await log.reader({A0: end, A1: 0}), records=300)
    assert len(gathered) < len(alone) / 2


async def test_a_member_gets_the_first_record_after_a_pause_at_once(log: KafkaLog) -> None:
    member, writer = await member_of(log), await log.writer()
    await read_nothing(member, for_s=BUSY_S + 0.5)
    await writer.write(Emit(topic="a", partition=0, key=b"", value=b"x"))
    began_s = time.monotonic()
    (record,) = await member.read(timeout_s=5.0, records_max=10)
    assert record.value == b"x"
    assert time.monotonic() - began_s < ONE_WAIT_S / 4


async def test_a_quiet_reader_closes_at_once(log: KafkaLog) -> None:
    reader = await log.reader({A0: 0, A1: 0})
    await read_nothing(reader, for_s=QUIET_AFTER_S + 1)
    began_s = time.monotonic()
    await reader.close()
    assert time.monotonic() - began_s < ONE_WAIT_S / 4
