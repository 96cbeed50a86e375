"""Reads fixed partitions of a cluster, from explicit positions that are never reset silently."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka import errors as kafka_errors

from forgemq_bus.errors import ClosedError, LogError, OutOfRangeError
from forgemq_bus.kafka_connection import (
    KafkaConnection,
    bound_and_translate,
    client_settings,
    connect,
    stop_client,
)
from forgemq_bus.kafka_run import KafkaRun
from forgemq_bus.log import READ_BYTES_MAX, Isolation, Place, Record
from forgemq_bus.names import broker_topic
from forgemq_bus.payloads import Values
from forgemq_bus.read_ahead import ReadAhead

# A fetch that waits at the broker does not include a partition that is resumed or sought meanwhile:
# such a partition waits this long at most. An arriving record ends the wait at once.
FETCH_WAIT_MS_MAX = 250
# The same for a reader that got nothing for a while and has no partition paused: it asks seldom.
# Well below the time after which a request counts as unanswered (REQUEST_TIMEOUT_MS).
FETCH_WAIT_QUIET_MS_MAX = 2_000
QUIET_AFTER_S = 5.0
# A reader that gathers lets the broker collect this much (some hundred records), for this long at
# most, while records keep coming: the last ones came less than BUSY_S ago. Else the broker answers
# a fetch of it for every record that is written: at 150 turns a second that was half of the CPU
# time of the graders' process.
GATHER_BYTES = 256 * 1024
GATHER_WAIT_MS_MAX = 50
BUSY_S = 0.5
# One fetch and one partition's part in it: bounds a reader's memory (see KafkaReader).
FETCH_BYTES_MAX = 4 * 1024 * 1024
PARTITION_FETCH_BYTES_MAX = 1024 * 1024
# aiokafka's fetcher retries a dead broker without end and without an error: if it answers no fetch
# of a partition between two checks, this long apart, ask the broker itself.
PROBE_AFTER_S = 10.0


async def open_consumer(
    connection: KafkaConnection, *, isolation: Isolation, doing: str
) -> AIOKafkaConsumer:
    """Start an aiokafka consumer without a group, which raises if a position does not exist.

    Raises:
        LogUnavailableError: the brokers do not answer; says what it is for (`doing`).
    """
    consumer = AIOKafkaConsumer(
        **client_settings(connection),
        enable_auto_commit=False,
        auto_offset_reset="none",
        isolation_level=f"read_{isolation}",
        fetch_max_wait_ms=FETCH_WAIT_MS_MAX,
        fetch_max_bytes=FETCH_BYTES_MAX,
        max_partition_fetch_bytes=PARTITION_FETCH_BYTES_MAX,
    )
    client = consumer._client
    await connect(connection, client, consumer.start, consumer.stop, client.close, doing=doing)
    return consumer


class KafkaReader:
    """Implements `log.Reader`; for one task at a time. `open_reader` makes one.

    Memory: at most one fetch here and one in aiokafka, each 4 MiB from each broker, before
    decompression.
    """

    def __init__(
        self,
        consumer: AIOKafkaConsumer,
        positions: Mapping[Place, int],
        *,
        kafka_run: KafkaRun,
        values: Values,
        gathers: bool = False,
        count: Callable[[int], None] = lambda _: None,
    ) -> None:
        """A reader over a started consumer that nothing else uses; see `open_reader`."""
        self._gathers = gathers
        self._count = count
        self._consumer = consumer
        self._kafka_run = kafka_run
        self._values = values
        self._partitions = {
            place: TopicPartition(broker_topic(place.topic, run=kafka_run.run), place.partition)
            for place in positions
        }
        self._places = {partition: place for place, partition in self._partitions.items()}
        self._positions = dict(positions)
        self._ahead = ReadAhead(list(positions))
        self._paused: set[Place] = set()
        self._seeks = 0
        self._heard_s = self._probed_s = asyncio.get_running_loop().time()
        self._answers: dict[Place, int | None] = {}
        self.is_closed = False
        if positions:
            consumer.assign(list(self._places))
            for place, position in positions.items():
                consumer.seek(self._partitions[place], position)

    async def read(
        self, *, timeout_s: float, records_max: int, bytes_max: int = READ_BYTES_MAX
    ) -> list[Record]:
        """Records in offset order per partition; [] if none came within the time.

        Raises:
            OutOfRangeError: a position that its partition does not have; names both.
            BlobError: the blob store does not answer; a later call tries the record again.
            LogUnavailableError: the brokers do not answer.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        has_fetched = False
        while True:
            if self.is_closed:
                raise ClosedError("read after close")
            ahead, seeks = self._ahead.peek(records_max, without=self._paused), self._seeks
            taken = self._values.fitting(ahead, bytes_max)
            if taken:
                records = await self._values.fetch(taken)
                if seeks == self._seeks:
                    self._ahead.drop(taken)
                    self._count(len(records))
                    return records
                continue  # `seek` was called while the blobs were fetched.
            left_s = deadline_s - loop.time()
            if left_s <= 0 and has_fetched:
                return []
            await self._fetch(max(left_s, 0.0))
            has_fetched = True

    def position(self, place: Place) -> int:
        """Offset of the next record that `read` returns for the partition."""
        ahead = self._ahead.first_offset(place)
        return self._positions[place] if ahead is None else ahead

    def seek(self, place: Place, position: int) -> None:
        """Continue from this position; records read ahead are dropped."""
        self._consumer.seek(self._partitions[place], position)
        self._positions[place] = position
        self._ahead.clear(place)
        self._seeks += 1
        self._heard_s = asyncio.get_running_loop().time()

    def pause(self, places: Sequence[Place]) -> None:
        """Return no records of these partitions until `resume`; keep their positions."""
        self._paused.update(places)
        self._consumer.pause(*(self._partitions[place] for place in places))

    def resume(self, places: Sequence[Place]) -> None:
        """Undo `pause`."""
        self._paused.difference_update(places)
        self._consumer.resume(*(self._partitions[place] for place in places))

    async def close(self) -> None:
        """Release the connection; idempotent."""
        if not self.is_closed:
            self.is_closed = True
            await stop_client(self._consumer.stop, self._consumer._client.close)

    async def _fetch(self, wait_s: float) -> None:
        """Wait for records and add them to the buffer."""
        if not self._partitions:
            await asyncio.sleep(wait_s)
            return
        try:
            batches = await self._consumer.getmany(timeout_ms=wait_s * 1000)
        except kafka_errors.OffsetOutOfRangeError as error:
            raise await self._out_of_range(error) from error
        except kafka_errors.ConsumerStoppedError as error:
            raise ClosedError("closed while reading") from error
        except kafka_errors.KafkaError as error:
            raise LogError(
                f"read from {self._kafka_run.connection.bootstrap}: {error!r}"
            ) from error
        for partition, batch in batches.items():
            place = self._places[partition]
            self._ahead.add(place, [_record(place, message) for message in batch])
        # Also for partitions without records: markers and aborted records advance positions.
        state = self._consumer._subscription.subscription.assignment.state_value
        for place, partition in self._partitions.items():
            self._positions[place] = state(partition).position
        now_s = asyncio.get_running_loop().time()
        if batches:
            self._heard_s = self._probed_s = now_s
        self._set_fetch_wait(now_s)
        if now_s - self._probed_s > PROBE_AFTER_S:
            self._probed_s = now_s
            await self._probe()

    def _set_fetch_wait(self, now_s: float) -> None:
        """Let the next fetch wait longer at the broker if records have become rare, or gather."""
        silent_s = now_s - self._heard_s
        wait_ms, bytes_min = FETCH_WAIT_MS_MAX, 1
        if self._gathers and silent_s < BUSY_S:
            wait_ms, bytes_min = GATHER_WAIT_MS_MAX, GATHER_BYTES
        elif silent_s > QUIET_AFTER_S and not self._paused:
            wait_ms = FETCH_WAIT_QUIET_MS_MAX
        # aiokafka reads these before each fetch, and has no method to change them.
        self._consumer._fetcher._fetch_max_wait_ms = wait_ms
        self._consumer._fetcher._fetch_min_bytes = bytes_min

    async def _probe(self) -> None:
        """Ask for a partition that had no answer to a fetch since the last call, if there is one.

        Not for others: on the connection of the fetches the question waits for the fetch before it.
        """
        state = self._consumer._subscription.subscription.assignment.state_value
        former = self._answers
        self._answers = {
            place: state(partition).timestamp
            for place, partition in self._partitions.items()
            if place not in self._paused
        }
        silent = (place for place, at in self._answers.items() if at == former.get(place))
        if (place := next(silent, None)) is not None:
            async with bound_and_translate(self._kafka_run.connection, "read"):
                await self._consumer.end_offsets([self._partitions[place]])

    async def _out_of_range(self, error: kafka_errors.OffsetOutOfRangeError) -> OutOfRangeError:
        partition, position = next(iter(error.args[0].items()))
        place = self._places[partition]
        async with bound_and_translate(self._kafka_run.connection, "read"):
            first = await self._consumer.beginning_offsets([partition])
            end = await self._consumer.end_offsets([partition])
        return OutOfRangeError(
            f"{place}: position {position} is outside {first[partition]}..{end[partition]}"
        )


async def open_reader(
    kafka_run: KafkaRun,
    positions: Mapping[Place, int],
    *,
    isolation: Isolation,
    values: Values,
    gathers: bool = False,
    count: Callable[[int], None] = lambda _: None,
) -> KafkaReader:
    """Open a reader of exactly these partitions.

    `gathers`: while records keep coming, they come a little later and more at once. `count` gets
    the number of records of each read.

    Raises:
        LogUnavailableError: the brokers do not answer.
    """
    consumer = await open_consumer(kafka_run.connection, isolation=isolation, doing="open a reader")
    return KafkaReader(
        consumer, positions, kafka_run=kafka_run, values=values, gathers=gathers, count=count
    )


def _record(place: Place, message: ConsumerRecord) -> Record:
    return Record(
        topic=place.topic,
        partition=place.partition,
        offset=message.offset,
        timestamp_ms=message.timestamp,
        key=message.key or b"",
        value=message.value or b"",
        headers=tuple(message.headers),
    )
