"""A member of a consumer group: aiokafka keeps the membership, a separate reader reads.

aiokafka's consumer cannot do both: it returns records of new partitions while the callback for them
is still running, and it sends no heartbeats while it awaits that callback. So its consumer stays
paused and only reports the assignment; a `KafkaReader` reads once the callback has returned.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka import errors as kafka_errors
from aiokafka.coordinator.assignors.range import RangePartitionAssignor

from forgemq_bus.errors import ClosedError, FencedError, LogError, PartitionCountError
from forgemq_bus.kafka_connection import client_settings, connect, stop_client
from forgemq_bus.kafka_reader import KafkaReader, open_reader
from forgemq_bus.kafka_run import KafkaRun
from forgemq_bus.kafka_topics import KafkaTopics
from forgemq_bus.log import READ_BYTES_MAX, Place, Record, Subscription
from forgemq_bus.names import broker_place, broker_topic
from forgemq_bus.payloads import fetch_from

HEARTBEAT_MS = 1_000  # Also how soon a member learns that another one joined.
REBALANCE_TIMEOUT_MS = 60_000  # How long `on_assigned` and `on_revoked` may take together.
# Two processes of one instance replace each other with each heartbeat; a process that was taken for
# dead is replaced once.
REPLACED_MAX = 3
REPLACED_WITHIN_S = 60.0


class Membership(ConsumerRebalanceListener):  # type: ignore[misc] # aiokafka has no types here.
    """aiokafka's callbacks; every rebalance revokes all partitions and assigns the new ones."""

    def __init__(self, member: "KafkaMember") -> None:
        """Forward the callbacks to this member."""
        self._member = member

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """Revoke; no other member gets the partitions before this returns."""
        del revoked
        await self._member.revoke()

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Start the assignment; returns at once, because no heartbeat is sent before."""
        self._member.assign([Place(*partition) for partition in assigned])


class KafkaMember:
    """Implements `log.Member`; for one task at a time. Call `join` first."""

    def __init__(
        self,
        subscription: Subscription,
        *,
        topics: KafkaTopics,
        kafka_run: KafkaRun,
    ) -> None:
        """A member that has not joined; the subscription's group is a name on the broker."""
        self._topics = topics
        self._kafka_run = kafka_run
        self._group = subscription.group
        self._names = subscription.topics
        self._count = 0
        self._on_assigned = subscription.on_assigned
        self._on_revoked = subscription.on_revoked
        self._instance = subscription.instance
        self._has_records = subscription.has_records
        self._member_id = ""
        self._replaced_s: deque[float] = deque(maxlen=REPLACED_MAX)
        self._consumer: AIOKafkaConsumer | None = None
        self._reader: KafkaReader | None = None
        self._taking: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._revoking = asyncio.Lock()
        self._assigned: frozenset[int] = frozenset()
        self._given: frozenset[int] = frozenset()
        self._paused: set[Place] = set()
        self._failure: BaseException | None = None
        self.is_closed = False

    async def join(self) -> None:
        """Join the group; returns after the first assignment and its callback.

        Raises:
            ValueError: the topics have different numbers of partitions.
            LogUnavailableError: the brokers do not answer.
        """
        wanted = [broker_topic(name, run=self._kafka_run.run) for name in self._names]
        counts = await self._topics.counts(wanted)
        if len(set(counts.values())) != 1:
            raise ValueError(f"topics of group {self._group} are not co-partitioned: {counts}")
        self._count = next(iter(counts.values()))
        self._consumer = AIOKafkaConsumer(
            **client_settings(self._kafka_run.connection),
            group_id=self._group,
            group_instance_id=self._instance or None,
            enable_auto_commit=False,
            auto_offset_reset="earliest",  # Never used: the consumer is paused.
            partition_assignment_strategy=(RangePartitionAssignor,),
            session_timeout_ms=int(self._kafka_run.connection.session_timeout_s * 1000),
            heartbeat_interval_ms=HEARTBEAT_MS,
            rebalance_timeout_ms=REBALANCE_TIMEOUT_MS,
            max_partition_fetch_bytes=1,
        )
        self._consumer.subscribe(topics=wanted, listener=Membership(self))
        try:
            connection, client = self._kafka_run.connection, self._consumer._client
            await connect(connection, client, self._consumer.start, doing=f"join {self._group}")
            await self._changed.wait()
            self._raise_failure()
        except BaseException:
            # Also on a cancellation: an open consumer would go on as a member of the group.
            await self.close()
            raise

    def assigned(self) -> frozenset[int]:
        """Partition numbers that this member owns."""
        return self._assigned

    async def revoke(self) -> None:
        """Stop reading, then call `on_revoked`; other members get the partitions afterwards."""
        async with self._revoking:
            if self._taking is not None:
                await asyncio.wait([self._taking])
                self._taking = None
            self._changed.clear()
            given, self._given, self._assigned = self._given, frozenset(), frozenset()
            await self._close_reader()
            if given:
                try:
                    await self._on_revoked(given)
                except BaseException as error:
                    # The caller's callback may raise anything. aiokafka only logs it, so `read`
                    # raises it too.
                    self._fail(error)
                    raise

    def assign(self, places: Sequence[Place]) -> None:
        """Start reading these partitions as soon as `on_assigned` has returned."""
        if self.is_closed or self._consumer is None:
            return
        self._consumer.pause(*self._consumer.assignment())
        numbers = frozenset(place.partition for place in places)
        # Each topic is divided by its own count: with other counts two members may own a number.
        is_equal = len(places) == len(numbers) * len(self._names)
        if not is_equal or max(numbers, default=0) >= self._count:
            self._fail(
                PartitionCountError(
                    f"group {self._group}: its topics had {self._count} partitions when this "
                    "process joined, and somebody has added some to one of them"
                )
            )
            return
        if self._instance and self._is_replaced(self._consumer._coordinator.member_id):
            self._fail(
                FencedError(
                    f"another process of {self._group} is instance {self._instance!r} too: "
                    "FORGEMQ_SERVICE_INSTANCE must differ"
                )
            )
            return
        # Not in a task group: it belongs to aiokafka's rebalance, and `revoke` awaits it.
        self._taking = asyncio.create_task(self._take(numbers))  # noqa: TID251

    def _is_replaced(self, member_id: str) -> bool:
        """Whether other processes of this instance take its place again and again.

        The brokers give a member another id only after they dropped its former one.
        """
        former, self._member_id = self._member_id, member_id
        if not former or former == member_id:
            return False
        now_s = asyncio.get_running_loop().time()
        self._replaced_s.append(now_s)
        is_full = len(self._replaced_s) == REPLACED_MAX
        return is_full and now_s - self._replaced_s[0] < REPLACED_WITHIN_S

    async def _take(self, numbers: frozenset[int]) -> None:
        try:
            if numbers:
                await self._on_assigned(numbers)
                self._given = numbers
            if numbers and self._has_records:
                self._reader = await self._open_reader(numbers)
            self._assigned = numbers
        except BaseException as error:
            # The caller's callback may raise anything. `revoke` only waits for this task to end,
            # so `join` and `read` raise its error.
            self._fail(error)
            if isinstance(error, asyncio.CancelledError):
                raise
        self._changed.set()

    async def _open_reader(self, numbers: frozenset[int]) -> KafkaReader:
        places = [Place(name, number) for name in self._names for number in sorted(numbers)]
        on_broker = [broker_place(place, run=self._kafka_run.run) for place in places]
        first = await self._topics.first(on_broker)
        committed = await self._topics.committed(self._group, on_broker)
        reader = await open_reader(
            self._kafka_run,
            {
                place: committed.get(there, first[there])
                for place, there in zip(places, on_broker, strict=True)
            },
            isolation="committed",
            values=fetch_from(self._kafka_run.blobs),
            gathers=True,  # Graders read through all records, and nobody waits for one of them.
        )
        reader.pause([place for place in places if place in self._paused])
        return reader

    def _fail(self, error: BaseException) -> None:
        """Keep an error of a callback or the brokers, for the next `read` to raise."""
        self._failure = error
        self._changed.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def read(
        self, *, timeout_s: float, records_max: int, bytes_max: int = READ_BYTES_MAX
    ) -> list[Record]:
        """Records in offset order per partition; [] if none came within the time.

        Raises:
            LogError: as `KafkaReader.read`. Errors of callbacks are raised here too.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while True:
            if self.is_closed or self._consumer is None:
                raise ClosedError("read after close")
            left_s = max(0.0, deadline_s - loop.time())
            try:
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
            except TimeoutError:
                return []
            self._raise_failure()
            await self._check_membership()
            reader = self._reader
            if reader is None:
                await asyncio.sleep(min(left_s, 0.05) if self._has_records else left_s)
                if left_s == 0:
                    return []
                continue
            try:
                records = await reader.read(
                    timeout_s=left_s, records_max=records_max, bytes_max=bytes_max
                )
            except ClosedError:
                continue  # Revoked while reading: wait for the next assignment.
            return records if reader is self._reader else []

    async def _check_membership(self) -> None:
        """Let aiokafka see that this member is alive; raise if its membership has ended."""
        assert self._consumer is not None
        try:
            await self._consumer.getmany(timeout_ms=0)
        except kafka_errors.KafkaError as error:
            raise LogError(f"member of {self._group}: {error!r}") from error

    def position(self, place: Place) -> int:
        """Offset of the next record that `read` returns for the partition."""
        return self._owned().position(place)

    def seek(self, place: Place, position: int) -> None:
        """Continue from this position; records read ahead are dropped."""
        self._owned().seek(place, position)

    def pause(self, places: Sequence[Place]) -> None:
        """Return no records of these partitions until `resume`, also across rebalances."""
        self._paused.update(places)
        if self._reader is not None:
            self._reader.pause([place for place in places if self._owns(place)])

    def resume(self, places: Sequence[Place]) -> None:
        """Undo `pause`."""
        self._paused.difference_update(places)
        if self._reader is not None:
            self._reader.resume([place for place in places if self._owns(place)])

    def _owns(self, place: Place) -> bool:
        return place.topic in self._names and place.partition in self._assigned

    def _owned(self) -> KafkaReader:
        if self._reader is None:
            raise KeyError("no partition is assigned")
        return self._reader

    async def close(self) -> None:
        """Leave the group, after `on_revoked`; idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        self._changed.set()
        if self._consumer is not None:
            try:
                await self.revoke()
            finally:
                await stop_client(self._consumer.stop, self._consumer._client.close)

    async def _close_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.close()
