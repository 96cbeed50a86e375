"""A record that the brokers refuse for good costs no later write."""

import asyncio
from typing import Any

import pytest
from aiokafka import errors as kafka_errors

from forgemq_bus.errors import ClosedError, LogError, LogUnavailableError
from forgemq_bus.kafka_connection import KafkaConnection
from forgemq_bus.kafka_run import KafkaRun
from forgemq_bus.kafka_writer import KafkaOutbox, KafkaWriter
from forgemq_bus.log import Emit

RUN = KafkaRun(
    connection=KafkaConnection(bootstrap="a:1", retry_s=0.2),
    run="r",
    blobs=None,
    inline_bytes_max=9,
)


def emit(value: bytes) -> Emit:
    return Emit(topic="a", partition=0, key=b"", value=value)


class Producer:
    """Acknowledges a record when the test sets its future, or refuses it."""

    def __init__(self, number: int) -> None:
        self.number, self.offset = number, 10 * number
        self.waiting: dict[bytes, asyncio.Future[Any]] = {}
        self.stops = 0
        self.client = self

    async def check(self, places: Any) -> None:
        assert places

    async def partitions_for(self, name: str) -> None:
        assert name

    async def send(self, _: str, **record: Any) -> "asyncio.Future[Any]":
        waiting = self.waiting[record["value"]] = asyncio.get_running_loop().create_future()
        if record["value"] == b"now":
            waiting.set_result(self)
        return waiting

    async def stop(self) -> None:
        self.stops += 1

    async def close(self) -> None:
        assert self.stops


class Producers:
    """Every producer that a writer opened."""

    def __init__(self) -> None:
        self.opened: list[Producer] = []
        self.may_open = asyncio.Event()
        self.may_open.set()

    async def open(self) -> KafkaOutbox:
        await self.may_open.wait()
        producer: Any = Producer(len(self.opened))
        self.opened.append(producer)
        return KafkaOutbox(producer, topics=producer, kafka_run=RUN)

    async def writer(self) -> KafkaWriter:
        return KafkaWriter(await self.open(), open_outbox=self.open)


async def writer_with_a_refused_record(
    producers: Producers,
) -> tuple[KafkaWriter, "asyncio.Task[int]"]:
    """The writer, and a write that was on its way before and still waits for its producer."""
    writer = await producers.writer()
    innocent = asyncio.create_task(writer.write(emit(b"before")))
    refused = asyncio.create_task(writer.write(emit(b"bad")))
    await asyncio.sleep(0)
    error = kafka_errors.MessageSizeTooLargeError()
    producers.opened[0].waiting[b"bad"].set_exception(error)
    with pytest.raises(LogError, match="MessageSizeTooLarge"):
        await refused
    return writer, innocent


async def test_what_follows_a_refused_record_is_written_by_another_producer() -> None:
    producers = Producers()
    writer, innocent = await writer_with_a_refused_record(producers)
    (first,) = producers.opened
    assert await asyncio.gather(*(writer.write(emit(b"now")) for _ in range(3))) == [10] * 3
    assert (len(producers.opened), first.stops) == (2, 0), "one write still waits for the first"
    first.waiting[b"before"].set_result(first)
    assert await innocent == 0
    await writer.close()
    assert [producer.stops for producer in producers.opened] == [1, 1]


async def test_a_write_without_an_answer_in_time_is_on_its_way_and_its_producer_stays() -> None:
    producers = Producers()
    writer = await producers.writer()
    with pytest.raises(LogUnavailableError):
        await writer.write(emit(b"late"))
    assert await writer.write(emit(b"now")) == 0
    await writer.close()
    assert [producer.stops for producer in producers.opened] == [1]


async def test_a_writer_that_is_closed_while_it_opens_another_producer_closes_both() -> None:
    producers = Producers()
    writer = await producers.writer()
    refused = asyncio.create_task(writer.write(emit(b"bad")))
    await asyncio.sleep(0)
    producers.opened[0].waiting[b"bad"].set_exception(kafka_errors.InvalidTopicError())
    with pytest.raises(LogError):
        await refused
    producers.may_open.clear()
    writing = asyncio.create_task(writer.write(emit(b"now")))
    await asyncio.sleep(0)
    await writer.close()
    producers.may_open.set()
    with pytest.raises(ClosedError):
        await writing
    assert all(producer.stops for producer in producers.opened)
    assert len(producers.opened) == 2


async def test_a_producer_that_was_replaced_is_closed_by_its_last_write_after_the_writer() -> None:
    producers = Producers()
    writer, innocent = await writer_with_a_refused_record(producers)
    (first,) = producers.opened
    assert await writer.write(emit(b"now")) == 10
    await writer.close()
    first.waiting[b"before"].set_result(first)
    assert await innocent == 0
    assert [producer.stops for producer in producers.opened] == [1, 1]
