"""Writes to a cluster, idempotent and acknowledged by all replicas, also in transactions."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from aiokafka import AIOKafkaProducer, TopicPartition
from aiokafka import errors as kafka_errors

from forgemq_bus.errors import (
    ClosedError,
    LogError,
    LogUnavailableError,
    RecordTooLargeError,
)
from forgemq_bus.kafka_connection import (
    KafkaConnection,
    bound_and_translate,
    client_settings,
    connect,
    stop_client,
)
from forgemq_bus.kafka_run import KafkaRun
from forgemq_bus.kafka_topics import RECORD_BYTES_MAX, KafkaTopics
from forgemq_bus.log import Emit, Place
from forgemq_bus.names import broker_place, broker_topic, in_run
from forgemq_bus.payloads import offloaded

TRANSACTION_TIMEOUT_MS = 10_000  # Longest time a killed writer blocks committed readers.
BATCH_BYTES_MAX = 256 * 1024  # Per partition; a larger record is a batch alone.


OpenOutbox: TypeAlias = Callable[[], Awaitable["KafkaOutbox"]]


class KafkaOutbox:
    """The part that both writers share: checks, the blob store and one producer."""

    def __init__(
        self,
        producer: AIOKafkaProducer,
        *,
        topics: KafkaTopics,
        kafka_run: KafkaRun,
    ) -> None:
        """An outbox over a started producer that nothing else uses."""
        self.producer = producer
        self.topics = topics
        self.connection = kafka_run.connection
        self.run = kafka_run.run
        self._blobs = kafka_run.blobs
        self._inline_bytes_max = kafka_run.inline_bytes_max

    async def prepared(self, emits: Sequence[Emit]) -> list[Emit]:
        """Check the records and move large values to the blob store; returns what to send.

        Raises:
            UnknownPlaceError: a partition that does not exist.
            RecordTooLargeError: a value is above the limit, and there is no blob store.
        """
        await self.topics.check({broker_place(emit.place, run=self.run) for emit in emits})
        for emit in emits:
            if self._blobs is None and len(emit.value) > RECORD_BYTES_MAX:
                raise RecordTooLargeError(
                    f"{emit.place}: a value of {len(emit.value)} bytes is above "
                    f"{RECORD_BYTES_MAX} and this log has no blob store"
                )
        return await offloaded(emits, blobs=self._blobs, inline_bytes_max=self._inline_bytes_max)

    async def send(self, emits: Sequence[Emit]) -> list[asyncio.Future[Any]]:
        """Hand records to the producer in this order; returns a future of each acknowledgement."""
        names = [broker_topic(emit.topic, run=self.run) for emit in emits]
        # Metadata first, so that nothing suspends between the sends below and their order holds.
        for name in set(names):
            await self.producer.partitions_for(name)
        waiting = []
        for emit, name in zip(emits, names, strict=True):
            future = await self.producer.send(
                name,
                value=emit.value,
                key=emit.key,
                partition=emit.partition,
                headers=list(emit.headers),
            )
            # If several fail only one is awaited: keeps asyncio from reporting the others.
            future.add_done_callback(_retrieve)
            waiting.append(future)
        return waiting

    async def stop(self) -> None:
        """Flush and release the connection."""
        await stop_client(self.producer.stop, self.producer.client.close)


@dataclass(slots=True)
class _Line:
    """A producer, how many writes wait for it, and whether the brokers may refuse all to come."""

    outbox: KafkaOutbox
    writes: int = 0
    is_broken: bool = False


class KafkaWriter:
    """Implements `log.Writer`; any number of tasks may write at once.

    A producer numbers what it writes to a partition. If the brokers refuse a record for good, its
    number is missing from then on, and they refuse all that follows it, as what was on its way to
    the same partition. So another producer takes the place of one with a refused record, and the
    last write that waits for the former closes it.
    """

    def __init__(self, outbox: KafkaOutbox, *, open_outbox: OpenOutbox) -> None:
        """A writer over a started producer; `open_outbox` starts another one."""
        self._line = _Line(outbox)
        self._open_outbox = open_outbox
        self._opening = asyncio.Lock()
        self.is_closed = False

    async def write(self, emit: Emit) -> int:
        """Write one record; returns its offset once it is durable.

        Raises:
            LogUnavailableError: no answer in time; the record may still be written later.
        """
        return (await self.write_all([emit]))[0]

    async def write_all(self, emits: Sequence[Emit]) -> list[int]:
        """Write records, in order per partition, without waiting in between."""
        if self.is_closed:
            raise ClosedError("write after close")
        line = await self._sound() if self._line.is_broken else self._line
        line.writes += 1
        try:
            # Apart: a slow blob store is no broker that does not answer.
            return await self._write(line, await line.outbox.prepared(emits))
        finally:
            line.writes -= 1
            if line.is_broken and not line.writes and not self._has_closed(line):
                await line.outbox.stop()

    def _has_closed(self, line: _Line) -> bool:
        return self.is_closed and line is self._line

    async def _write(self, line: _Line, ready: Sequence[Emit]) -> list[int]:
        try:
            async with bound_and_translate(line.outbox.connection, "write"):
                # One after the other: a gathering of them costs more than the write of one.
                return [(await written).offset for written in await line.outbox.send(ready)]
        except LogUnavailableError:
            raise  # They are still on their way.
        except LogError:
            line.is_broken = True
            raise

    async def _sound(self) -> _Line:
        """Another producer in place of the broken one; the first task that needs it opens it."""
        async with self._opening:
            if self._line.is_broken:
                opened = await self._open_outbox()
                if self.is_closed:
                    await opened.stop()
                    raise ClosedError("write after close")
                self._line = _Line(opened)
            return self._line

    async def close(self) -> None:
        """Flush and release the connection; idempotent."""
        if not self.is_closed:
            self.is_closed = True
            await self._line.outbox.stop()


class KafkaTransactionWriter:
    """Implements `log.TransactionWriter`; one commit at a time.

    A commit that fails after its values are in the blob store leaves the writer dead. Whether the
    transaction was committed is known once a new writer of the same id is open: opening waits until
    it has ended.
    """

    def __init__(self, outbox: KafkaOutbox, *, transactional_id: str) -> None:
        """A writer over a started producer with this transactional id."""
        self._outbox = outbox
        self._transactional_id = transactional_id
        self._death: LogError | None = None
        self.is_closed = False

    async def commit(
        self, *, outputs: Sequence[Emit], group: str, positions: Mapping[Place, int]
    ) -> None:
        """Publish all outputs and commit all positions of the group, or do neither.

        Raises:
            FencedError: a newer writer with this id exists; this one is dead.
            LogUnavailableError: no answer in time; this writer is dead too.
        """
        if self.is_closed:
            raise ClosedError("commit after close")
        if self._death is not None:
            raise self._death
        run = self._outbox.run
        offsets = {
            TopicPartition(*broker_place(place, run=run)): position
            for place, position in positions.items()
        }
        await self._outbox.topics.check({Place(*partition) for partition in offsets})
        ready = await self._outbox.prepared(outputs)
        if not ready and not offsets:
            return
        try:
            async with bound_and_translate(
                self._outbox.connection, f"commit of {self._transactional_id}"
            ):
                await self._commit(ready, offsets, in_run(group, run=run))
        except LogError as error:
            self._death = error
            raise
        except asyncio.CancelledError:
            self._death = ClosedError(f"a commit of {self._transactional_id} was cancelled halfway")
            raise

    async def _commit(
        self, ready: Sequence[Emit], offsets: Mapping[TopicPartition, int], group: str
    ) -> None:
        producer = self._outbox.producer
        try:
            await producer.begin_transaction()
            # In sequence: while the coordinator handles one request of a transaction, the brokers
            # refuse its others, and aiokafka pauses before it repeats them.
            await asyncio.gather(*await self._outbox.send(firsts_first(ready)))
            if offsets:
                await producer.send_offsets_to_transaction(offsets, group)
            await producer.commit_transaction()
        except kafka_errors.KafkaError as error:
            _mark_failures_seen(producer)
            raise _cause(error) from error

    async def close(self) -> None:
        """Release the connection; idempotent."""
        if not self.is_closed:
            self.is_closed = True
            await self._outbox.stop()


def firsts_first(emits: Sequence[Emit]) -> list[Emit]:
    """The records, in order per partition, with the first one of each partition in front.

    All partitions then join the transaction in one request, before large batches block senders.
    """
    seen: set[Place] = set()
    firsts: list[Emit] = []
    rest: list[Emit] = []
    for emit in emits:
        (rest if emit.place in seen else firsts).append(emit)
        seen.add(emit.place)
    return firsts + rest


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Mark a failure as seen; the writer raises it where it is awaited."""
    if future.done() and not future.cancelled():
        future.exception()


def _mark_failures_seen(producer: AIOKafkaProducer) -> None:
    """Mark the futures of a dead transaction as seen: nothing awaits those in aiokafka."""
    _retrieve(producer._txn_manager.wait_for_transaction_end())
    for batches in producer._message_accumulator._batches.values():
        for batch in batches:
            _retrieve(batch._drain_waiter)


def _cause(error: kafka_errors.KafkaError) -> kafka_errors.KafkaError:
    """The error inside the one that aiokafka's sender task raised."""
    cause = error.__cause__
    return cause if isinstance(cause, kafka_errors.KafkaError) else error


async def open_producer(
    connection: KafkaConnection, *, transactional_id: str | None
) -> AIOKafkaProducer:
    """Start a producer; with an id, older ones are fenced and their transactions have ended.

    Raises:
        LogUnavailableError: the brokers do not answer.
    """
    settings: dict[str, Any] = {}
    if transactional_id is not None:
        settings["transactional_id"] = transactional_id
        settings["transaction_timeout_ms"] = TRANSACTION_TIMEOUT_MS
    producer = AIOKafkaProducer(
        **client_settings(connection),
        acks="all",
        enable_idempotence=True,
        compression_type="zstd",
        max_batch_size=BATCH_BYTES_MAX,
        max_request_size=RECORD_BYTES_MAX + 64 * 1024,  # Keys, headers and framing.
        **settings,
    )
    stops = producer.stop, producer.client.close
    doing = f"open writer {transactional_id or ''}"
    await connect(connection, producer.client, producer.start, *stops, doing=doing)
    return producer
