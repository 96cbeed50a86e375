"""The state of a broker: partitions with offsets, transactions, committed positions.

One store stands for one cluster, every `MemoryLog` over it for one process. Partitions have the
topic's name on the broker, records its name in the contracts. Offsets behave as on Kafka: a commit
or abort writes a marker that takes an offset and is never read.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from forgemq_bus.errors import FencedError, OutOfRangeError, UnknownPlaceError
from forgemq_bus.log import Emit, Isolation, Place, Record
from forgemq_bus.names import broker_place
from forgemq_bus.topic_counts import check_counts

TransactionState = Literal["open", "committed", "aborted"]


@dataclass(slots=True)
class Transaction:
    """One transaction; committed readers see its entries once it is committed."""

    transactional_id: str
    state: TransactionState = "open"
    firsts: dict[Place, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """One offset of a partition: a record, or the marker that ended a transaction (None)."""

    record: Record | None
    transaction: Transaction | None


@dataclass(slots=True)
class Partition:
    """Entries from offset `first` on, without holes."""

    first: int = 0
    entries: list[Entry] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Offset that the next entry gets."""
        return self.first + len(self.entries)


class MemoryStore:
    """A cluster in one process, for tests and simulations; not thread-safe."""

    def __init__(self, clock_ms: Callable[[], int] | None = None) -> None:
        """An empty cluster; without a clock the n-th record of all is written at n ms."""
        self.partitions: dict[Place, Partition] = {}
        self.positions: dict[tuple[str, Place], int] = {}
        self._open: dict[str, Transaction] = {}
        self._epochs: dict[str, int] = {}
        self._waiters: dict[asyncio.Future[None], frozenset[Place] | None] = {}
        self._written = 0
        self._clock_ms = clock_ms or self._count

    def _count(self) -> int:
        return self._written

    def create(self, partitions: Mapping[str, int], *, may_grow: Collection[str] = ()) -> None:
        """Create what does not exist; PartitionCountError, and no topic, if a count differs."""
        self.check_counts(partitions, may_grow=may_grow)
        for topic, count in partitions.items():
            for number in range(count):
                self.partitions.setdefault(Place(topic, number), Partition())

    def check_counts(
        self, partitions: Mapping[str, int], *, may_grow: Collection[str] = ()
    ) -> None:
        """Check the numbers of those that exist; PartitionCountError if one differs."""
        counts = {topic: self.partition_count(topic) for topic in partitions}
        existing = {topic: count for topic, count in counts.items() if count}
        check_counts(existing, partitions, may_grow=may_grow)

    def partition_count(self, topic: str) -> int:
        """Number of partitions; 0 if the topic does not exist."""
        return sum(place.topic == topic for place in self.partitions)

    def partition(self, place: Place) -> Partition:
        """The partition; UnknownPlaceError if it does not exist."""
        partition = self.partitions.get(place)
        if partition is None:
            raise UnknownPlaceError(f"{place} does not exist")
        return partition

    def end_position(self, place: Place, *, isolation: Isolation) -> int:
        """The end; for committed readers the first offset of an open transaction, if any."""
        end = self.partition(place).end
        if isolation == "uncommitted":
            return end
        firsts = (transaction.firsts.get(place, end) for transaction in self._open.values())
        return min(firsts, default=end)

    def append(
        self, emits: Sequence[Emit], *, run: str, transaction: Transaction | None = None
    ) -> list[int]:
        """Append in order; returns the offsets. Appends nothing if a partition does not exist."""
        placed = []  # Filled in loops: most calls have one record, which a comprehension slows.
        for emit in emits:
            place = broker_place(emit.place, run=run)
            placed.append((place, self.partition(place), emit))
        offsets = []
        for place, partition, emit in placed:
            if transaction is not None:
                transaction.firsts.setdefault(place, partition.end)
            offsets.append(self._append(partition, emit, transaction))
        self.wake([place for place, _, _ in placed])
        return offsets

    def _append(self, partition: Partition, emit: Emit, transaction: Transaction | None) -> int:
        self._written += 1
        record = Record(
            topic=emit.topic,
            partition=emit.partition,
            offset=partition.end,
            timestamp_ms=self._clock_ms(),
            key=emit.key,
            value=emit.value,
            headers=emit.headers,
        )
        partition.entries.append(Entry(record, transaction))
        return record.offset

    def fence(self, transactional_id: str) -> int:
        """Abort the open transaction of this id, if any; returns the new writer's epoch."""
        left_open = self._open.pop(transactional_id, None)
        if left_open is not None:
            self.end(left_open, state="aborted")
        self._epochs[transactional_id] = self._epochs.get(transactional_id, 0) + 1
        return self._epochs[transactional_id]

    def begin(self, transactional_id: str, *, epoch: int) -> Transaction:
        """Open a transaction; FencedError if a newer writer of the id exists."""
        newest = self._epochs[transactional_id]
        if epoch != newest:
            raise FencedError(f"{transactional_id}: epoch {epoch} was fenced by epoch {newest}")
        self._open[transactional_id] = Transaction(transactional_id)
        return self._open[transactional_id]

    def end(self, transaction: Transaction, *, state: Literal["committed", "aborted"]) -> None:
        """End the transaction and write its markers."""
        transaction.state = state
        self._open.pop(transaction.transactional_id, None)
        for place in sorted(transaction.firsts):
            self.partition(place).entries.append(Entry(None, transaction))
        self.wake(transaction.firsts)

    def collect(
        self, place: Place, position: int, *, isolation: Isolation, records_max: int
    ) -> tuple[list[Record], int]:
        """Records from a position on, and the position after them.

        Raises:
            OutOfRangeError: the partition has no such position.
        """
        partition = self.partition(place)
        if not partition.first <= position <= partition.end:
            raise OutOfRangeError(
                f"{place}: position {position} is outside {partition.first}..{partition.end}"
            )
        stop = self.end_position(place, isolation=isolation)
        found: list[Record] = []
        while position < stop:
            entry = partition.entries[position - partition.first]
            if _is_visible(entry, isolation=isolation) and entry.record is not None:
                if len(found) == records_max:
                    break
                found.append(entry.record)
            position += 1
        return found, position

    def trim(self, place: Place, before: int) -> None:
        """Delete the entries below an offset; OutOfRangeError if it is above the end."""
        partition = self.partition(place)
        if before > partition.end:
            raise OutOfRangeError(
                f"{place}: cannot trim before {before}, the end is {partition.end}"
            )
        count = max(0, before - partition.first)
        del partition.entries[:count]
        partition.first += count

    async def wait_for_arrival(
        self, timeout_s: float, *, among: frozenset[Place] | None = None
    ) -> None:
        """Wait until something is appended or a transaction ends, or the time is over.

        `among`: only what concerns these partitions counts; None: of all.
        """
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiters[waiter] = among
        timer = loop.call_later(timeout_s, _wake, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            del self._waiters[waiter]

    def wake(self, places: Collection[Place] | None = None) -> None:
        """Wake the readers that wait for one of these partitions; None: all readers."""
        for waiter, among in self._waiters.items():
            if places is None or among is None or not among.isdisjoint(places):
                _wake(waiter)


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


def _is_visible(entry: Entry, *, isolation: Isolation) -> bool:
    if entry.record is None:
        return False
    is_aborted = entry.transaction is not None and entry.transaction.state == "aborted"
    return isolation == "uncommitted" or not is_aborted
