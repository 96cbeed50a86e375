"""The log in memory: behaves as `KafkaLog`, without a broker.

For unit tests and simulations. It is deterministic (time is a counter unless a clock is passed in),
has many handles over one store, and a writer can leave a transaction open as a killed process does.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

from forgemq_bus.blobs import BlobStore
from forgemq_bus.errors import ClosedError
from forgemq_bus.log import AssignmentCallback, Emit, Isolation, Place, Record, Subscription
from forgemq_bus.memory_groups import MemoryGroups, MemoryMember
from forgemq_bus.memory_reader import MemoryReader
from forgemq_bus.memory_store import MemoryStore, Transaction
from forgemq_bus.names import broker_place, broker_topic, in_run
from forgemq_bus.payloads import LEAVE_IN_STORE, fetch_from, fetched, offloaded


class MemoryWriter:
    """Implements `log.Writer`."""

    def __init__(
        self, store: MemoryStore, *, run: str, blobs: BlobStore | None, inline_bytes_max: int
    ) -> None:
        """A writer into the store."""
        self._store = store
        self._run = run
        self._blobs = blobs
        self._inline_bytes_max = inline_bytes_max
        self.is_closed = False

    async def write(self, emit: Emit) -> int:
        """Write one record; returns its offset."""
        return (await self.write_all([emit]))[0]

    async def write_all(self, emits: Sequence[Emit]) -> list[int]:
        """Write records, in order; returns their offsets."""
        if self.is_closed:
            raise ClosedError("write after close")
        ready = await offloaded(emits, blobs=self._blobs, inline_bytes_max=self._inline_bytes_max)
        return self._store.append(ready, run=self._run)

    async def close(self) -> None:
        """Refuse further writes; idempotent."""
        self.is_closed = True


class MemoryTransactionWriter:
    """Implements `log.TransactionWriter`."""

    def __init__(
        self,
        store: MemoryStore,
        *,
        transactional_id: str,
        run: str,
        blobs: BlobStore | None,
        inline_bytes_max: int,
    ) -> None:
        """A writer that has fenced the older ones of its id; the id is a name on the broker."""
        self._store = store
        self._transactional_id = transactional_id
        self._run = run
        self._blobs = blobs
        self._inline_bytes_max = inline_bytes_max
        self._epoch = store.fence(transactional_id)
        self.is_closed = False

    async def commit(
        self, *, outputs: Sequence[Emit], group: str, positions: Mapping[Place, int]
    ) -> None:
        """Publish all outputs and commit all positions of the group, or do neither.

        Raises:
            FencedError: a newer writer with this id exists; this one is dead.
        """
        places = {broker_place(place, run=self._run): at for place, at in positions.items()}
        for place in places:
            self._store.partition(place)
        transaction = await self._begin(outputs)
        for place, position in places.items():
            self._store.positions[in_run(group, run=self._run), place] = position
        self._store.end(transaction, state="committed")

    async def abandon(self, *, outputs: Sequence[Emit]) -> None:
        """Write the outputs and end before the commit, as a killed process does.

        The transaction stays open until a newer writer of this id aborts it.
        """
        await self._begin(outputs)
        self.is_closed = True

    async def abort(self, *, outputs: Sequence[Emit]) -> None:
        """Write the outputs and abort; committed readers never see them."""
        self._store.end(await self._begin(outputs), state="aborted")

    async def _begin(self, outputs: Sequence[Emit]) -> Transaction:
        if self.is_closed:
            raise ClosedError("commit after close")
        ready = await offloaded(outputs, blobs=self._blobs, inline_bytes_max=self._inline_bytes_max)
        for emit in ready:
            self._store.partition(broker_place(emit.place, run=self._run))
        transaction = self._store.begin(self._transactional_id, epoch=self._epoch)
        self._store.append(ready, run=self._run, transaction=transaction)
        return transaction

    async def close(self) -> None:
        """Refuse further commits; idempotent."""
        self.is_closed = True


Opened: TypeAlias = MemoryReader | MemoryMember | MemoryWriter | MemoryTransactionWriter


class MemoryLog:
    """Implements `log.Log`; one handle stands for one process.

    Example:
        `first = MemoryLog(run="r")`; `second = first.open()` reads what `first` wrote.
    """

    def __init__(
        self,
        *,
        run: str,
        clock_ms: Callable[[], int] | None = None,
        blobs: BlobStore | None = None,
        inline_bytes_max: int = 900_000,
        instance: str = "",
    ) -> None:
        """An empty cluster; without a clock the n-th record of all has the timestamp n."""
        self._run = run
        self._blobs = blobs
        self._inline_bytes_max = inline_bytes_max
        self._instance = instance
        self._store = MemoryStore(clock_ms)
        self._groups = MemoryGroups()
        self._opened: list[Opened] = []
        self.is_closed = False

    def open(
        self, *, run: str | None = None, has_blobs: bool = True, instance: str = ""
    ) -> "MemoryLog":
        """Open another handle on the same cluster, as another process has; of this run or `run`."""
        other = MemoryLog(
            run=self._run if run is None else run,
            blobs=self._blobs if has_blobs else None,
            inline_bytes_max=self._inline_bytes_max,
            instance=instance,
        )
        other._store = self._store
        other._groups = self._groups
        return other

    async def create_topics(
        self, partitions: Mapping[str, int], *, may_grow: Collection[str] = ()
    ) -> frozenset[str]:
        """Create the topics that do not exist; PartitionCountError if a count differs."""
        self._check_open()
        on_broker = {topic: broker_topic(topic, run=self._run) for topic in partitions}
        made = {topic for topic in partitions if not self._store.partition_count(on_broker[topic])}
        self._store.create(
            {on_broker[topic]: count for topic, count in partitions.items()},
            may_grow={broker_topic(topic, run=self._run) for topic in may_grow},
        )
        return frozenset(made)

    async def check_counts(self, partitions: Mapping[str, int]) -> None:
        """Check that these topics have so many partitions, as far as they exist."""
        self._check_open()
        self._store.check_counts(
            {broker_topic(topic, run=self._run): count for topic, count in partitions.items()}
        )

    async def reader(
        self,
        positions: Mapping[Place, int],
        *,
        isolation: Isolation = "committed",
        has_values: bool = True,
        gathers: bool = False,
    ) -> MemoryReader:
        """Open a reader of exactly these partitions, from these positions."""
        del gathers  # A read of this log costs nobody else anything.
        self._check_open()
        for place in positions:
            self._store.partition(broker_place(place, run=self._run))
        values = fetch_from(self._blobs) if has_values else LEAVE_IN_STORE
        reader = MemoryReader(
            self._store, positions, run=self._run, isolation=isolation, values=values
        )
        self._keep(reader)
        return reader

    async def values(self, records: Sequence[Record]) -> list[Record]:
        """The same records, read without values, with their values."""
        return await fetched(records, blobs=self._blobs)

    async def member(
        self,
        *,
        group: str,
        topics: Sequence[str],
        on_assigned: AssignmentCallback,
        on_revoked: AssignmentCallback,
        has_records: bool = True,
    ) -> MemoryMember:
        """Join a consumer group; returns after the first assignment."""
        self._check_open()
        subscription = Subscription(
            group=in_run(group, run=self._run),
            topics=tuple(topics),
            on_assigned=on_assigned,
            on_revoked=on_revoked,
            instance=self._instance,
            has_records=has_records,
        )
        reader = MemoryReader(self._store, {}, run=self._run, values=fetch_from(self._blobs))
        member = MemoryMember(reader, subscription, groups=self._groups)
        await self._groups.join(member)
        self._keep(member)
        return member

    async def writer(self) -> MemoryWriter:
        """Open a writer outside transactions."""
        self._check_open()
        writer = MemoryWriter(
            self._store,
            run=self._run,
            blobs=self._blobs,
            inline_bytes_max=self._inline_bytes_max,
        )
        self._keep(writer)
        return writer

    async def transaction_writer(self, transactional_id: str) -> MemoryTransactionWriter:
        """Open a transactional writer; fences the older ones with this id."""
        self._check_open()
        writer = MemoryTransactionWriter(
            self._store,
            transactional_id=in_run(transactional_id, run=self._run),
            run=self._run,
            blobs=self._blobs,
            inline_bytes_max=self._inline_bytes_max,
        )
        self._keep(writer)
        return writer

    async def committed(self, *, group: str, places: Sequence[Place]) -> dict[Place, int]:
        """Committed positions of the group; a partition without one is absent."""
        name = in_run(group, run=self._run)
        keys = {place: (name, broker_place(place, run=self._run)) for place in places}
        known = self._store.positions
        return {place: known[key] for place, key in keys.items() if key in known}

    async def first_positions(self, places: Sequence[Place]) -> dict[Place, int]:
        """Offset of the oldest record that is kept."""
        return {
            place: self._store.partition(broker_place(place, run=self._run)).first
            for place in places
        }

    async def end_positions(
        self, places: Sequence[Place], *, isolation: Isolation = "committed"
    ) -> dict[Place, int]:
        """Offset that the next record will get (committed: the last stable offset)."""
        return {
            place: self._store.end_position(broker_place(place, run=self._run), isolation=isolation)
            for place in places
        }

    async def trim(self, before: Mapping[Place, int]) -> None:
        """Delete records below these offsets."""
        for place, offset in before.items():
            self._store.trim(broker_place(place, run=self._run), offset)

    async def close(self) -> None:
        """Close everything this log opened; idempotent."""
        self.is_closed = True
        for opened in reversed(self._opened):
            await opened.close()
        self._opened.clear()

    def _keep(self, opened: Opened) -> None:
        """Close it with the log, unless its user does so first."""
        self._opened = [other for other in self._opened if not other.is_closed]
        self._opened.append(opened)

    def _check_open(self) -> None:
        if self.is_closed:
            raise ClosedError("the log is closed")
