"""The log on Apache Kafka, over aiokafka; only the bus imports that client.

Readers, writers and members do not share connections, so a long poll of one cannot delay another.
Connections are opened on first use.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from forgemq_bus.blobs import BlobStore
from forgemq_bus.errors import ClosedError
from forgemq_bus.kafka_connection import KafkaConnection
from forgemq_bus.kafka_member import KafkaMember
from forgemq_bus.kafka_reader import KafkaReader, open_reader
from forgemq_bus.kafka_run import KafkaRun
from forgemq_bus.kafka_topics import KafkaTopics
from forgemq_bus.kafka_writer import (
    KafkaOutbox,
    KafkaTransactionWriter,
    KafkaWriter,
    open_producer,
)
from forgemq_bus.log import AssignmentCallback, Isolation, Place, Record, Subscription
from forgemq_bus.names import broker_place, broker_topic, contract_topic, in_run
from forgemq_bus.payloads import LEAVE_IN_STORE, fetch_from, fetched
from forgemq_bus.setting_faults import SettingFault
from forgemq_contracts.topics import OF_RUN

__all__ = ["KafkaConnection", "KafkaLog"]

Opened: TypeAlias = KafkaReader | KafkaMember | KafkaWriter | KafkaTransactionWriter


class KafkaLog:
    """Implements `log.Log`.

    Example:
        `log = KafkaLog(KafkaConnection(bootstrap="127.0.0.1:9092"), run="r")`, then
        `await (await log.writer()).write(emit)` and at the end `await log.close()`.
    """

    def __init__(
        self,
        connection: KafkaConnection,
        *,
        run: str,
        blobs: BlobStore | None = None,
        inline_bytes_max: int = 900_000,
        instance: str = "",
    ) -> None:
        """Nothing is connected yet; without a blob store values are limited to 8 MiB.

        With an `instance` the members of this log keep their partitions over a restart: see
        `log.Subscription`.
        """
        self._run = run
        self._instance = instance
        self._kafka_run = KafkaRun(
            connection=connection, run=run, blobs=blobs, inline_bytes_max=inline_bytes_max
        )
        self._topics = KafkaTopics(connection)
        self._opened: list[Opened] = []
        self.records_read = 0
        """By all readers of this log, for who tells how far a long read is."""
        self.is_closed = False

    async def create_topics(
        self, partitions: Mapping[str, int], *, may_grow: Collection[str] = ()
    ) -> frozenset[str]:
        """Create the topics that do not exist; PartitionCountError if a count differs."""
        self._check_open()
        made = await self._topics.create(
            self._on_broker(partitions),
            may_grow={broker_topic(topic, run=self._run) for topic in may_grow},
        )
        return frozenset(contract_topic(name, run=self._run) for name in made)

    async def check_counts(self, partitions: Mapping[str, int]) -> None:
        """Check that these topics have so many partitions, as far as they exist.

        Raises:
            PartitionCountError: one has another number.
        """
        self._check_open()
        await self._topics.check_counts(self._on_broker(partitions))

    def _on_broker(self, partitions: Mapping[str, int]) -> dict[str, int]:
        return {broker_topic(topic, run=self._run): count for topic, count in partitions.items()}

    async def setting_faults(self) -> list[SettingFault]:
        """Name the settings of the cluster under which records of this run can be lost.

        What this process may not read is not named.
        """
        self._check_open()
        return await self._topics.setting_faults(
            [broker_topic(topic.name, run=self._run) for topic in OF_RUN]
        )

    async def reader(
        self,
        positions: Mapping[Place, int],
        *,
        isolation: Isolation = "committed",
        has_values: bool = True,
        gathers: bool = False,
    ) -> KafkaReader:
        """Open a reader of exactly these partitions, from these positions."""
        self._check_open()
        await self._topics.check({broker_place(place, run=self._run) for place in positions})
        values = fetch_from(self._kafka_run.blobs) if has_values else LEAVE_IN_STORE
        reader = await open_reader(
            self._kafka_run,
            positions,
            isolation=isolation,
            values=values,
            gathers=gathers,
            count=self._count_read,
        )
        self._keep(reader)
        return reader

    async def values(self, records: Sequence[Record]) -> list[Record]:
        """The same records, read without values, with their values."""
        return await fetched(records, blobs=self._kafka_run.blobs)

    async def member(
        self,
        *,
        group: str,
        topics: Sequence[str],
        on_assigned: AssignmentCallback,
        on_revoked: AssignmentCallback,
        has_records: bool = True,
    ) -> KafkaMember:
        """Join a consumer group; returns after the first assignment and its callback."""
        self._check_open()
        subscription = Subscription(
            group=in_run(group, run=self._run),
            topics=tuple(topics),
            on_assigned=on_assigned,
            on_revoked=on_revoked,
            instance=self._instance,
            has_records=has_records,
        )
        member = KafkaMember(subscription, topics=self._topics, kafka_run=self._kafka_run)
        await member.join()
        self._keep(member)
        return member

    async def writer(self) -> KafkaWriter:
        """Open a writer outside transactions."""
        self._check_open()
        open_outbox = partial(self._outbox, None)
        writer = KafkaWriter(await open_outbox(), open_outbox=open_outbox)
        self._keep(writer)
        return writer

    async def transaction_writer(self, transactional_id: str) -> KafkaTransactionWriter:
        """Open a transactional writer; older ones of this id are fenced and have ended."""
        self._check_open()
        name = in_run(transactional_id, run=self._run)
        writer = KafkaTransactionWriter(await self._outbox(name), transactional_id=name)
        self._keep(writer)
        return writer

    async def committed(self, *, group: str, places: Sequence[Place]) -> dict[Place, int]:
        """Committed positions of the group; a partition without one is absent."""
        name = in_run(group, run=self._run)
        return self._of_contracts(await self._topics.committed(name, self._of_broker(places)))

    async def first_positions(self, places: Sequence[Place]) -> dict[Place, int]:
        """Offset of the oldest record that is kept."""
        return self._of_contracts(await self._topics.first(self._of_broker(places)))

    async def end_positions(
        self, places: Sequence[Place], *, isolation: Isolation = "committed"
    ) -> dict[Place, int]:
        """Offset that the next record will get (committed: the last stable offset)."""
        found = await self._topics.end(self._of_broker(places), isolation=isolation)
        return self._of_contracts(found)

    async def trim(self, before: Mapping[Place, int]) -> None:
        """Delete records below these offsets."""
        await self._topics.trim(
            {broker_place(place, run=self._run): offset for place, offset in before.items()}
        )

    async def close(self) -> None:
        """Close everything this log opened; idempotent."""
        self.is_closed = True
        while self._opened:
            await self._opened.pop().close()
        await self._topics.close()

    def _of_broker(self, places: Sequence[Place]) -> list[Place]:
        """These partitions under their topics' names on the broker."""
        return [broker_place(place, run=self._run) for place in places]

    def _of_contracts(self, positions: Mapping[Place, int]) -> dict[Place, int]:
        """Positions on the broker by the names of the contracts."""
        return {
            Place(contract_topic(place.topic, run=self._run), place.partition): position
            for place, position in positions.items()
        }

    async def _outbox(self, transactional_id: str | None) -> KafkaOutbox:
        producer = await open_producer(
            self._kafka_run.connection, transactional_id=transactional_id
        )
        return KafkaOutbox(producer, topics=self._topics, kafka_run=self._kafka_run)

    def _keep(self, opened: Opened) -> None:
        """Close it with the log, unless its user does so first."""
        self._opened = [other for other in self._opened if not other.is_closed]
        self._opened.append(opened)

    def _count_read(self, records: int) -> None:
        self.records_read += records

    def _check_open(self) -> None:
        if self.is_closed:
            raise ClosedError("the log is closed")
