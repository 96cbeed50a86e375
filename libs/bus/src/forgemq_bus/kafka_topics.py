"""Topics of a cluster: their creation, first and end positions, and committed positions."""

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka import errors as kafka_errors
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic, RecordsToDelete
from aiokafka.client import AIOKafkaClient, ConnectionGroup, CoordinationType

from forgemq_bus.errors import LogError, OutOfRangeError, UnknownPlaceError
from forgemq_bus.kafka_connection import (
    RETRY_PAUSE_S,
    KafkaConnection,
    bound_and_translate,
    client_settings,
    connect,
    retry,
    stop_client,
)
from forgemq_bus.kafka_reader import open_consumer
from forgemq_bus.kafka_settings import broker_settings, topic_facts
from forgemq_bus.log import Isolation, Place
from forgemq_bus.setting_faults import (
    TOPIC_RULES,
    SettingFault,
    insync_replicas_min,
    setting_faults,
)
from forgemq_bus.stable_positions import UNSTABLE_OFFSET_COMMIT, StablePositionsRequest
from forgemq_bus.topic_counts import check_counts

RECORD_BYTES_MAX = 8 * 1024 * 1024  # Of a value, if the log has no blob store.
MESSAGE_BYTES_MAX = RECORD_BYTES_MAX + 128 * 1024  # With keys, headers and framing.
TOPIC_CONFIGURATION = {
    **{name: value for name, (value, _) in TOPIC_RULES.items()},
    "max.message.bytes": str(MESSAGE_BYTES_MAX),
    "message.timestamp.type": "CreateTime",
}
BROKER_DEFAULT = -1  # Replication factor: the one that the cluster is configured with.

_ALREADY_EXISTS = kafka_errors.TopicAlreadyExistsError.errno


class KafkaTopics:
    """One connection of each kind, opened on first use; topics have their names on the broker."""

    def __init__(self, connection: KafkaConnection) -> None:
        """Nothing is connected yet."""
        self._connection = connection
        self._admin: AIOKafkaAdminClient | None = None
        self._client: AIOKafkaClient | None = None
        self._consumers: dict[Isolation, AIOKafkaConsumer] = {}
        self._counts: dict[str, int] = {}
        self._opening = asyncio.Lock()

    async def create(
        self, partitions: Mapping[str, int], *, may_grow: Collection[str] = ()
    ) -> set[str]:
        """Create the topics that do not exist, and the partitions that others lack.

        Args:
            partitions: How many each topic is to have.
            may_grow: Topics that may exist with fewer.

        Returns:
            The topics that this call made.

        Raises:
            PartitionCountError: a topic exists with another number of partitions.
            LogError: the cluster refuses.
        """
        existing = await self._describe(partitions)
        smaller = check_counts(existing, partitions, may_grow=may_grow)
        missing = {topic: partitions[topic] for topic in partitions if topic not in existing}
        made = await self._create(missing) if missing else set()
        if smaller:
            await self._grow(smaller)
        if missing or smaller:
            await self._until_known(missing | smaller, may_grow=smaller)
        return made

    async def _until_known(
        self, partitions: Mapping[str, int], *, may_grow: Collection[str]
    ) -> None:
        """Return when every broker knows these topics so; it answers before that."""
        async with bound_and_translate(self._connection, "describe topics"):
            while True:
                known = await self._describe(partitions)
                smaller = check_counts(known, partitions, may_grow=may_grow)
                if not smaller and known.keys() == partitions.keys():
                    return
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _create(self, missing: Mapping[str, int]) -> set[str]:
        admin = await self._admin_client()
        configuration = TOPIC_CONFIGURATION | await self._replication()
        new = [
            # NewTopic accepts the default factor only with an explicit, empty assignment.
            NewTopic(topic, count, BROKER_DEFAULT, {}, configuration)
            for topic, count in missing.items()
        ]
        async with bound_and_translate(self._connection, "create topics"):
            response = await retry(lambda: admin.create_topics(new))
            for topic, code, *rest in response.topic_errors:
                if code not in (0, _ALREADY_EXISTS):
                    message = next(iter(rest), "")
                    raise LogError(
                        f"create topic {topic}: {kafka_errors.for_code(code).__name__} {message}"
                    )
        return {topic for topic, code, *_ in response.topic_errors if code == 0}

    async def _grow(self, smaller: Mapping[str, int]) -> None:
        admin = await self._admin_client()
        wanted = {topic: NewPartitions(count) for topic, count in smaller.items()}
        async with bound_and_translate(self._connection, "add partitions"):
            await retry(lambda: admin.create_partitions(wanted))
        for topic in smaller:
            self._counts.pop(topic, None)

    async def check_counts(self, partitions: Mapping[str, int]) -> None:
        """Check that these topics have so many partitions, as far as they exist.

        Raises:
            PartitionCountError: one has another number.
        """
        check_counts(await self._describe(partitions), partitions)

    async def _replication(self) -> dict[str, str]:
        """How many copies an acknowledged record has; {} if the cluster does not say its factor."""
        admin = await self._admin_client()
        async with bound_and_translate(self._connection, "settings of the brokers"):
            brokers = await retry(lambda: broker_settings(admin))
        factors = {settings.get("default.replication.factor") for settings in brokers.values()}
        if None in factors or not factors:
            return {}
        replicas = min(int(factor) for factor in factors if factor)
        return {"min.insync.replicas": str(insync_replicas_min(replicas))}

    async def setting_faults(self, topics: Sequence[str]) -> list[SettingFault]:
        """Name the settings under which records of these topics can be lost."""
        admin = await self._admin_client()
        async with bound_and_translate(self._connection, "settings of brokers and topics"):
            brokers = await retry(lambda: broker_settings(admin))
            facts = await retry(lambda: topic_facts(admin, topics))
        return setting_faults(brokers=brokers, topics=facts, message_bytes_min=MESSAGE_BYTES_MAX)

    async def check(self, places: Set[Place]) -> None:
        """Check that these partitions exist; the broker is asked once for each topic.

        Raises:
            UnknownPlaceError: names the partition.
        """
        unknown = {place.topic for place in places} - self._counts.keys()
        if unknown:
            self._counts |= await self._describe(unknown)
        for place in places:
            if not 0 <= place.partition < self._counts.get(place.topic, 0):
                raise UnknownPlaceError(
                    f"{place} does not exist on {self._connection.bootstrap}; the topic has "
                    f"{self._counts.get(place.topic, 0)} partitions"
                )

    async def counts(self, topics: Sequence[str]) -> dict[str, int]:
        """Number of partitions of each topic; UnknownPlaceError if one does not exist."""
        await self.check({Place(topic, 0) for topic in topics})
        return {topic: self._counts[topic] for topic in topics}

    async def first(self, places: Sequence[Place]) -> dict[Place, int]:
        """Offset of the oldest record that is kept."""
        await self.check(set(places))
        consumer = await self._consumer("committed")
        asked = [TopicPartition(*place) for place in places]
        async with bound_and_translate(self._connection, "first positions"):
            found = await retry(lambda: consumer.beginning_offsets(asked))
        return {Place(*partition): offset for partition, offset in found.items()}

    async def end(self, places: Sequence[Place], *, isolation: Isolation) -> dict[Place, int]:
        """Offset of the next record; committed: of the first open transaction, if any."""
        await self.check(set(places))
        consumer = await self._consumer(isolation)
        asked = [TopicPartition(*place) for place in places]
        async with bound_and_translate(self._connection, "end positions"):
            found = await retry(lambda: consumer.end_offsets(asked))
        return {Place(*partition): offset for partition, offset in found.items()}

    async def committed(self, group: str, places: Sequence[Place]) -> dict[Place, int]:
        """Committed positions of a group; waits for transactions in their last phase."""
        await self.check(set(places))
        if not places:
            return {}
        client = await self._plain_client()
        async with bound_and_translate(self._connection, f"committed positions of {group}"):
            found = None
            while found is None:
                found = await retry(lambda: self._committed(client, group, places))
                await asyncio.sleep(RETRY_PAUSE_S if found is None else 0)
        return {place: offset for place, offset in found.items() if offset >= 0}

    async def _committed(
        self, client: AIOKafkaClient, group: str, places: Sequence[Place]
    ) -> dict[Place, int] | None:
        """Ask once; None while a transaction's positions are not settled."""
        numbers: dict[str, list[int]] = defaultdict(list)
        for place in places:
            numbers[place.topic].append(place.partition)
        node = await client.coordinator_lookup(CoordinationType.GROUP, group)
        response = await client.send(
            node, StablePositionsRequest(group, numbers), group=ConnectionGroup.COORDINATION
        )
        codes = {response.error_code}
        found: dict[Place, int] = {}
        for topic, partitions, _ in response.topics:
            for partition, offset, _epoch, _metadata, code, _tags in partitions:
                codes.add(code)
                found[Place(topic, partition)] = offset
        if UNSTABLE_OFFSET_COMMIT in codes:
            return None
        for code in codes - {0}:
            raise kafka_errors.for_code(code)()
        return found

    async def trim(self, before: Mapping[Place, int]) -> None:
        """Delete records below these offsets.

        Raises:
            OutOfRangeError: an offset above the end of its partition.
        """
        await self.check(before.keys())
        if not before:
            return
        admin = await self._admin_client()
        requests = {
            TopicPartition(*place): RecordsToDelete(offset) for place, offset in before.items()
        }
        async with bound_and_translate(self._connection, "trim"):
            try:
                await retry(lambda: admin.delete_records(requests))
            except kafka_errors.OffsetOutOfRangeError as error:
                raise OutOfRangeError(f"cannot trim above the end: {dict(before)}") from error

    async def close(self) -> None:
        """Release the connections; idempotent."""
        admin, client, consumers = self._admin, self._client, list(self._consumers.values())
        self._admin, self._client = None, None
        self._consumers.clear()
        for consumer in consumers:
            await stop_client(consumer.stop, consumer._client.close)
        if admin is not None:
            await stop_client(admin.close)
        if client is not None:
            await stop_client(client.close)

    async def _describe(self, topics: Iterable[str]) -> dict[str, int]:
        admin = await self._admin_client()
        async with bound_and_translate(self._connection, "describe topics"):
            described = await retry(lambda: admin.describe_topics(sorted(topics)))
        return {
            found["topic"]: len(found["partitions"])
            for found in described
            if found["error_code"] == 0
        }

    async def _admin_client(self) -> AIOKafkaAdminClient:
        async with self._opening:
            if self._admin is None:
                admin = AIOKafkaAdminClient(**client_settings(self._connection))
                doing = "open the admin connection"
                await connect(
                    self._connection, admin._client, admin.start, admin.close, doing=doing
                )
                self._admin = admin
            return self._admin

    async def _plain_client(self) -> AIOKafkaClient:
        async with self._opening:
            if self._client is None:
                client = AIOKafkaClient(**client_settings(self._connection))

                async def start() -> None:
                    await client.bootstrap()  # Looked up here: `connect` replaces it.

                await connect(self._connection, client, start, client.close, doing="connect")
                self._client = client
            return self._client

    async def _consumer(self, isolation: Isolation) -> AIOKafkaConsumer:
        async with self._opening:
            if isolation not in self._consumers:
                self._consumers[isolation] = await open_consumer(
                    self._connection, isolation=isolation, doing="connect"
                )
            return self._consumers[isolation]
