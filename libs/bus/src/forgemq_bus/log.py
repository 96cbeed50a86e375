"""The interface of a log: ordered partitions, offsets, transactions.

Two implementations pass one conformance suite: `KafkaLog` (aiokafka) and `MemoryLog`. Topic names
here are those of `contracts.topics`; a `Log` belongs to one run and adds the run's prefix itself.
An offset is always the offset of a record; a position is the offset of the next record to read.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

from msgspec import Struct

Headers: TypeAlias = tuple[tuple[str, bytes], ...]
Isolation: TypeAlias = Literal["committed", "uncommitted"]


READ_BYTES_MAX = 32 * 1024 * 1024
"""Values of one read if its caller sets no bound: many small records, or a few large ones."""


class Place(NamedTuple):
    """One partition of one topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        """For messages: `topic/partition`."""
        return f"{self.topic}/{self.partition}"


class Record(Struct, frozen=True, kw_only=True):
    """One record as read from a log; its value is encoded and complete, also if it was a blob.

    Attributes:
        lost: Why no reader can have the value any more, which is b"" then: its blob is gone or
            damaged. "" if it is there.
    """

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes
    value: bytes
    headers: Headers = ()
    lost: str = ""

    @property
    def place(self) -> Place:
        """The partition it was read from."""
        return Place(self.topic, self.partition)

    @property
    def where(self) -> str:
        """For messages: `topic/partition@offset`."""
        return f"{self.place}@{self.offset}"


class Emit(Struct, frozen=True, kw_only=True):
    """One record to write, to a partition given by number."""

    topic: str
    partition: int
    key: bytes
    value: bytes
    headers: Headers = ()

    @property
    def place(self) -> Place:
        """The partition it goes to."""
        return Place(self.topic, self.partition)


class Reader(Protocol):
    """Reads fixed partitions from given positions; commits nothing."""

    async def read(
        self, *, timeout_s: float, records_max: int, bytes_max: int = READ_BYTES_MAX
    ) -> list[Record]:
        """Records in offset order per partition; [] if none came within the time.

        Their values have `bytes_max` together, those from the blob store included; a value that is
        larger comes alone.
        """
        ...

    def position(self, place: Place) -> int:
        """Offset of the next record that `read` returns for the partition."""
        ...

    def seek(self, place: Place, position: int) -> None:
        """Continue from this position; records read ahead are dropped."""
        ...

    def pause(self, places: Sequence[Place]) -> None:
        """Return no records of these partitions until `resume`; keep their positions."""
        ...

    def resume(self, places: Sequence[Place]) -> None:
        """Undo `pause`."""
        ...

    async def close(self) -> None:
        """Release the connection; idempotent."""
        ...


class Member(Reader, Protocol):
    """A reader whose partitions a consumer group assigns; every topic gets the same numbers.

    Reading starts at the group's committed position, or at the first offset if it has none. No
    record of a partition is returned before `on_assigned` for it has returned.
    """

    def assigned(self) -> frozenset[int]:
        """Partition numbers that this member owns."""
        ...


class Writer(Protocol):
    """Writes outside transactions; retries add no duplicate, and all replicas acknowledge."""

    async def write(self, emit: Emit) -> int:
        """Write one record; returns its offset once it is durable."""
        ...

    async def write_all(self, emits: Sequence[Emit]) -> list[int]:
        """Write records, in order per partition; returns their offsets."""
        ...

    async def close(self) -> None:
        """Flush and release the connection; idempotent."""
        ...


class TransactionWriter(Protocol):
    """Writes outputs and input positions atomically; a newer writer of the same id fences it."""

    async def commit(
        self, *, outputs: Sequence[Emit], group: str, positions: Mapping[Place, int]
    ) -> None:
        """Publish all outputs and commit all positions of the group, or do neither.

        Raises:
            FencedError: a newer writer with this id exists; this one is dead.
        """
        ...

    async def close(self) -> None:
        """Release the connection; idempotent."""
        ...


AssignmentCallback: TypeAlias = Callable[[frozenset[int]], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """A consumer group to join, its topics, and what to call as partitions come and go.

    Attributes:
        group: Name on the broker.
        instance: Which process of the group this is, also after a restart: the newest member of an
            instance gets the partitions of the one before it, and no other member notices. "": a
            process like any other.
        has_records: Whether the member reads its partitions. If not, it only owns them: `read`
            returns [] after its time, and nothing is fetched.
    """

    group: str
    topics: tuple[str, ...]
    on_assigned: AssignmentCallback
    on_revoked: AssignmentCallback
    instance: str = ""
    has_records: bool = True


class LogReads(Protocol):
    """The part of a log that a replay needs: what is kept of each partition, and its records."""

    async def reader(
        self,
        positions: Mapping[Place, int],
        *,
        isolation: Isolation = "committed",
        has_values: bool = True,
        gathers: bool = False,
    ) -> Reader:
        """A reader of exactly these partitions, from these positions.

        If it `gathers`, records may come 50 ms later and more at once, while others keep coming.
        Without `has_values` a value in the blob store is not fetched: it is b"", and
        `payloads.reference_of` says where it lies.
        """
        ...

    async def values(self, records: Sequence[Record]) -> list[Record]:
        """The same records, read without values, with their values."""
        ...

    async def first_positions(self, places: Sequence[Place]) -> dict[Place, int]:
        """Offset of the oldest record that is kept (equal to the end if the partition is empty)."""
        ...

    async def end_positions(
        self, places: Sequence[Place], *, isolation: Isolation = "committed"
    ) -> dict[Place, int]:
        """Offset that the next record will get (committed: the last stable offset)."""
        ...


class Log(LogReads, Protocol):
    """The log of one run."""

    async def create_topics(
        self, partitions: Mapping[str, int], *, may_grow: Collection[str] = ()
    ) -> frozenset[str]:
        """Create the topics that do not exist, and the partitions that those of `may_grow` lack.

        Returns:
            The topics that this call made: of calls at the same time, one makes a topic.

        Raises:
            PartitionCountError: a topic exists with another number of partitions.
        """
        ...

    async def check_counts(self, partitions: Mapping[str, int]) -> None:
        """Check that these topics have so many partitions, as far as they exist.

        Raises:
            PartitionCountError: one has another number.
        """
        ...

    async def member(
        self,
        *,
        group: str,
        topics: Sequence[str],
        on_assigned: AssignmentCallback,
        on_revoked: AssignmentCallback,
        has_records: bool = True,
    ) -> Member:
        """Join a consumer group over co-partitioned topics; arguments: see `Subscription`."""
        ...

    async def writer(self) -> Writer:
        """Open a writer outside transactions."""
        ...

    async def transaction_writer(self, transactional_id: str) -> TransactionWriter:
        """Open a transactional writer; fences older ones with this id before it returns."""
        ...

    async def committed(self, *, group: str, places: Sequence[Place]) -> dict[Place, int]:
        """Committed positions of the group; a partition without one is absent."""
        ...

    async def trim(self, before: Mapping[Place, int]) -> None:
        """Delete records below these offsets."""
        ...

    async def close(self) -> None:
        """Close everything this log opened; idempotent."""
        ...
