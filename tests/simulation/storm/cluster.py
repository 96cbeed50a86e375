"""A cluster in memory whose transactions end as on Kafka: decided at once, visible bit by bit.

On Kafka a commit is decided by the coordinator, and its markers reach the partitions one after the
other. Until a marker is there, the partition's stable end stands still; until that of the consumer
group is there, a stable read of its positions waits. A writer of the same id, also a newer one that
fences, waits for all of them. A transaction that is left open is aborted after a time.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from forgemq_bus.log import Place
from forgemq_bus.memory_store import Entry, MemoryStore, Transaction

TRANSACTION_TIMEOUT_S = 10.0
"""As the Kafka writer's; a schedule's longest pause is shorter and longer ones are its killed."""

GroupPlace = tuple[str, Place]


@dataclass(slots=True)
class Committing:
    """A transaction that is decided, and whose markers are on their way."""

    transaction: Transaction
    positions: Mapping[GroupPlace, int]
    markers_left: int
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)
    has_positions: asyncio.Event = field(default_factory=asyncio.Event)


class StormStore(MemoryStore):
    """A store that delays markers, keeps what is trimmed for the oracle, and can lose data.

    Args:
        marker_delay_s: Draws the delay of one marker, in seconds; 0: it arrives at once.
        clock_ms: When a record is written; without it the n-th of all is written at n ms.

    Attributes:
        went_back: Positions that were committed below what stood there: key, before and after.
    """

    def __init__(
        self, marker_delay_s: Callable[[], float], *, clock_ms: Callable[[], int] | None = None
    ) -> None:
        super().__init__(clock_ms)
        self._marker_delay_s = marker_delay_s
        self._committing: dict[str, Committing] = {}
        self._trimmed: dict[Place, list[Entry]] = {}
        self.went_back: list[tuple[GroupPlace, int, int]] = []

    async def settled(self, transactional_id: str) -> None:
        """Wait until the previous transaction of this id has all its markers."""
        while (committing := self._committing.get(transactional_id)) is not None:
            await committing.has_ended.wait()

    async def stable(self, group: str) -> None:
        """Wait until no position of this group is decided but not visible."""
        for committing in list(self._committing.values()):
            if any(name == group for name, _ in committing.positions):
                await committing.has_positions.wait()

    def fence(self, transactional_id: str) -> int:
        """Abort what an older writer left open; only once its decided transaction is settled."""
        assert transactional_id not in self._committing, "`settled` comes first"
        return super().fence(transactional_id)

    def begin(self, transactional_id: str, *, epoch: int) -> Transaction:
        """Open a transaction that is aborted after `TRANSACTION_TIMEOUT_S`."""
        transaction = super().begin(transactional_id, epoch=epoch)
        loop = asyncio.get_running_loop()
        loop.call_later(TRANSACTION_TIMEOUT_S, self._time_out, transaction)
        return transaction

    def _time_out(self, transaction: Transaction) -> None:
        if transaction.state == "open":
            self.fence(transaction.transactional_id)

    def commit(self, transaction: Transaction, positions: Mapping[GroupPlace, int]) -> None:
        """Decide the commit; the markers of its partitions and positions follow one by one."""
        transaction.state = "committed"
        committing = Committing(transaction, positions, len(transaction.firsts) + 1)
        self._committing[transaction.transactional_id] = committing
        for place in sorted(transaction.firsts):
            self._later(self._write_marker, committing, place)
        self._later(self._write_positions, committing)

    def _later(self, write: Callable[..., None], *arguments: object) -> None:
        delay_s = self._marker_delay_s()
        if delay_s == 0:
            write(*arguments)
        else:
            asyncio.get_running_loop().call_later(delay_s, write, *arguments)

    def _write_marker(self, committing: Committing, place: Place) -> None:
        transaction = committing.transaction
        self.partition(place).entries.append(Entry(None, transaction))
        del transaction.firsts[place]
        self.wake()
        self._count_marker(committing)

    def _write_positions(self, committing: Committing) -> None:
        for key, position in committing.positions.items():
            if position < self.positions.get(key, 0):
                self.went_back.append((key, self.positions[key], position))
        self.positions.update(committing.positions)
        committing.has_positions.set()
        self._count_marker(committing)

    def _count_marker(self, committing: Committing) -> None:
        committing.markers_left -= 1
        if committing.markers_left == 0:
            transactional_id = committing.transaction.transactional_id
            del self._committing[transactional_id]
            self._open.pop(transactional_id, None)
            committing.has_ended.set()

    def end(self, transaction: Transaction, *, state: Literal["committed", "aborted"]) -> None:
        """Abort at once: the writer that aborts waits for the markers; a commit is `commit`."""
        assert state == "aborted", "writers of a storm commit with `commit`"
        super().end(transaction, state=state)

    def is_newest(self, transactional_id: str, *, epoch: int) -> bool:
        """Whether no newer writer of the id exists and its transaction did not time out."""
        return self._epochs[transactional_id] == epoch

    def trim(self, place: Place, before: int) -> None:
        """Delete the entries below an offset; `all_entries` still has them."""
        partition = self.partition(place)
        count = max(0, before - partition.first)
        self._trimmed.setdefault(place, []).extend(partition.entries[:count])
        super().trim(place, before)

    def all_entries(self, place: Place) -> list[Entry]:
        """Everything that was ever written to the partition, by offset, also what is trimmed."""
        return [*self._trimmed.get(place, ()), *self.partition(place).entries]

    def lose_tail(self, place: Place, *, records: int) -> None:
        """Lose the newest committed records of a partition and what is behind the first of them.

        As a replica does that was not flushed when the power went and became the leader.
        """
        partition = self.partition(place)
        while records and partition.entries:
            lost = partition.entries.pop()
            records -= lost.record is not None and _is_committed(lost)

    def expire_positions(self, is_expired: Callable[[str, Place], bool]) -> int:
        """Forget committed positions, as a broker does after its retention; returns how many."""
        expired = [key for key in sorted(self.positions) if is_expired(*key)]
        for key in expired:
            del self.positions[key]
        return len(expired)


def committed_records(entries: Sequence[Entry]) -> list[Entry]:
    """Those entries that are records a committed reader sees."""
    return [entry for entry in entries if entry.record is not None and _is_committed(entry)]


def _is_committed(entry: Entry) -> bool:
    return entry.transaction is None or entry.transaction.state == "committed"
