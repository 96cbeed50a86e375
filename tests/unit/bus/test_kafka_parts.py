"""Parts of the Kafka log that need no broker."""

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from aiokafka import errors as kafka_errors
from hypothesis import given
from hypothesis import strategies as st

from forgemq_bus.blobs import BlobStore
from forgemq_bus.errors import FencedError, LogError, LogUnavailableError
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_bus.kafka_connection import bound_and_translate, client_settings, retry, stop_client
from forgemq_bus.kafka_run import KafkaRun
from forgemq_bus.kafka_writer import KafkaOutbox, KafkaWriter, firsts_first
from forgemq_bus.log import Emit, Place
from forgemq_contracts.fields import BlobReference


@pytest.mark.parametrize("bootstrap", ["", "localhost", "a:1,b", "host:port"])
def test_an_address_without_a_port_is_refused(bootstrap: str) -> None:
    with pytest.raises(ValueError, match="bootstrap must be host:port"):
        KafkaConnection(bootstrap=bootstrap)


def test_an_unknown_protocol_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"security_protocol must be one of .* got 'TLS'"):
        KafkaConnection(bootstrap="a:1", security_protocol="TLS")  # type: ignore[arg-type]


def test_the_password_is_in_no_representation() -> None:
    connection = KafkaConnection(
        bootstrap="a:1", security_protocol="SASL_SSL", sasl_username="u", sasl_password="hidden"
    )
    assert "hidden" not in f"{connection!r} {connection}"


def test_client_settings_follow_the_security_protocol() -> None:
    plain = client_settings(KafkaConnection(bootstrap="a:1, b:2"))
    assert plain["bootstrap_servers"] == ["a:1", "b:2"]
    assert "ssl_context" not in plain
    assert "sasl_mechanism" not in plain
    secure = client_settings(
        KafkaConnection(
            bootstrap="a:1",
            security_protocol="SASL_SSL",
            sasl_mechanism="SCRAM-SHA-512",
            sasl_username="u",
            sasl_password="p",
        )
    )
    assert secure["ssl_context"].check_hostname
    assert secure["sasl_mechanism"] == "SCRAM-SHA-512"
    assert (secure["sasl_plain_username"], secure["sasl_plain_password"]) == ("u", "p")


@pytest.mark.slow
async def test_a_dead_address_is_named_with_the_time_it_was_tried() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        log = KafkaLog(KafkaConnection(bootstrap=address, retry_s=0.6), run="r")
        began_s = time.monotonic()
        with pytest.raises(LogUnavailableError, match=rf"{address} did not answer within 0\.6 s"):
            await log.writer()
        assert 0.5 < time.monotonic() - began_s < 3.0
        await log.close()


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (kafka_errors.ProducerFenced(), FencedError),
        (kafka_errors.InvalidProducerEpoch(), FencedError),
        (kafka_errors.KafkaTimeoutError(), LogUnavailableError),
        (kafka_errors.TopicAuthorizationFailedError("t"), LogError),
    ],
)
async def test_foreign_errors_are_translated(
    raised: kafka_errors.KafkaError, expected: type[LogError]
) -> None:
    with pytest.raises(expected, match="test: "):
        async with bound_and_translate(KafkaConnection(bootstrap="a:1"), "test"):
            raise raised


async def test_a_request_without_an_answer_is_repeated_as_long_as_the_connection_says() -> None:
    asked: list[float] = []

    async def answer_the_third() -> int:
        asked.append(time.monotonic())
        if len(asked) < 3:
            raise kafka_errors.KafkaTimeoutError
        return 7

    assert (await retry(answer_the_third), len(asked)) == (7, 3)

    async def never() -> None:
        raise kafka_errors.KafkaTimeoutError

    began_s = time.monotonic()
    with pytest.raises(LogUnavailableError, match=r"did not answer within 0\.3 s"):
        async with bound_and_translate(KafkaConnection(bootstrap="a:1", retry_s=0.3), "test"):
            await retry(never)
    assert time.monotonic() - began_s >= 0.3


class SlowStore(BlobStore):
    """Takes longer for each blob than a broker may for its answer."""

    async def put(self, data: bytes) -> BlobReference:
        await asyncio.sleep(0.2)
        return await super().put(data)


async def nothing_else() -> KafkaOutbox:
    raise AssertionError("the first producer is sound")


class Broker:
    """Knows every partition and acknowledges each record at once, at offset 7."""

    offset = 7

    async def check(self, places: Any) -> None:
        assert places

    async def partitions_for(self, name: str) -> None:
        assert name

    async def send(self, _: str, **record: Any) -> "asyncio.Future[Any]":
        assert record["value"] == b""
        acknowledged = asyncio.get_running_loop().create_future()
        acknowledged.set_result(self)
        return acknowledged


async def test_a_slow_blob_store_is_not_taken_for_a_broker_that_does_not_answer(
    tmp_path: Path,
) -> None:
    broker: Any = Broker()
    kafka_run = KafkaRun(
        connection=KafkaConnection(bootstrap="a:1", retry_s=0.1),
        run="r",
        blobs=SlowStore(str(tmp_path), run="r"),
        inline_bytes_max=1,
    )
    outbox = KafkaOutbox(broker, topics=broker, kafka_run=kafka_run)
    writer = KafkaWriter(outbox, open_outbox=nothing_else)
    large = Emit(topic="scored-groups-v1", partition=0, key=b"", value=b"large")
    assert await writer.write(large) == 7


async def test_only_retriable_errors_are_retried() -> None:
    waiting: list[kafka_errors.KafkaError] = [
        kafka_errors.NotLeaderForPartitionError(),
        kafka_errors.RequestTimedOutError(),
    ]

    async def call() -> str:
        if waiting:
            raise waiting.pop()
        return "answer"

    assert await retry(call) == "answer"
    waiting.append(kafka_errors.OffsetOutOfRangeError())
    with pytest.raises(kafka_errors.OffsetOutOfRangeError):
        await retry(call)


async def test_a_client_whose_stop_fails_or_is_cancelled_inside_is_released() -> None:
    released: list[str] = []

    async def release() -> None:
        released.append("yes")

    async def cancelled() -> None:
        raise asyncio.CancelledError

    async def refused() -> None:
        raise kafka_errors.KafkaConnectionError

    await stop_client(cancelled, release)
    await stop_client(refused, release)
    assert released == ["yes", "yes"]


@given(st.lists(st.integers(0, 3), max_size=30))
def test_firsts_first_keeps_every_partition_in_order(partitions: list[int]) -> None:
    emits = [
        Emit(topic="t", partition=partition, key=b"", value=b"%d" % number)
        for number, partition in enumerate(partitions)
    ]
    ordered = firsts_first(emits)
    for partition in set(partitions):
        place = Place("t", partition)
        mine = [item for item in emits if item.place == place]
        assert [item for item in ordered if item.place == place] == mine
    head = ordered[: len(set(partitions))]
    assert {item.partition for item in head} == set(partitions)
