"""Consumer groups of a `MemoryStore`; a join or leave reassigns all partitions, as on Kafka."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from forgemq_bus.errors import UnknownPlaceError
from forgemq_bus.log import READ_BYTES_MAX, Place, Record, Subscription
from forgemq_bus.memory_reader import MemoryReader
from forgemq_bus.memory_store import MemoryStore
from forgemq_bus.names import broker_place, broker_topic

SESSION_S = 10.0
"""How long the partitions of an instance wait for it, as on Kafka by default."""


@dataclass(slots=True)
class MemoryGroups:
    """All groups of a store, by their name on the broker.

    A member with an instance that has left keeps its place until the session is over or the group
    rebalances.
    """

    members: dict[str, list["MemoryMember"]] = field(default_factory=dict)
    gate: asyncio.Lock = field(default_factory=asyncio.Lock)
    _ending: asyncio.Future[None] | None = None

    async def join(self, member: "MemoryMember") -> None:
        """Add a member; returns when every member has its new partitions."""
        async with self.gate:
            members = self.members.setdefault(member.group, [])
            for index, other in enumerate(members):
                if member.instance and other.instance == member.instance:
                    await other.revoke()
                    members[index] = member
                    await self._assign(member.group, index)
                    return
            members.append(member)
            try:
                await self._reassign(member.group)
            except BaseException:
                # Also on a cancellation: a member that did not join must get no partitions.
                self.members[member.group].remove(member)
                raise

    async def leave(self, member: "MemoryMember") -> None:
        """Remove a member; its partitions go to the others."""
        async with self.gate:
            await member.revoke()
            if member.instance:
                loop = asyncio.get_running_loop()
                loop.call_later(SESSION_S, self._end_session, member)
            else:
                await self._reassign(member.group)

    def _end_session(self, member: "MemoryMember") -> None:
        if member in self.members[member.group]:
            self._ending = asyncio.ensure_future(self._rebalance(member.group))

    async def _rebalance(self, group: str) -> None:
        async with self.gate:
            await self._reassign(group)

    async def _reassign(self, group: str) -> None:
        self.members[group] = [member for member in self.members[group] if not member.is_closed]
        for member in self.members[group]:
            await member.revoke()
        for index in range(len(self.members[group])):
            await self._assign(group, index)

    async def _assign(self, group: str, index: int) -> None:
        members = self.members[group]
        count = members[index].partition_count()
        await members[index].assign(assigned_range(count, index=index, members=len(members)))


def assigned_range(partitions: int, *, index: int, members: int) -> frozenset[int]:
    """Numbers that the range assignor gives to one of the members, in join order."""
    share, rest = divmod(partitions, members)
    start = index * share + min(index, rest)
    return frozenset(range(start, start + share + (index < rest)))


class MemoryMember:
    """One member of a group; implements `log.Member`."""

    def __init__(
        self,
        reader: MemoryReader,
        subscription: Subscription,
        *,
        groups: MemoryGroups,
    ) -> None:
        """A member that has not joined: `MemoryGroups.join` adds it."""
        self.group = subscription.group
        self.instance = subscription.instance
        self._reader = reader
        self._topics = subscription.topics
        self._on_assigned = subscription.on_assigned
        self._on_revoked = subscription.on_revoked
        self._has_records = subscription.has_records
        self._groups = groups
        self._assigned: frozenset[int] = frozenset()
        self.is_closed = False

    @property
    def _store(self) -> MemoryStore:
        return self._reader.store

    def assigned(self) -> frozenset[int]:
        """Partition numbers that this member owns."""
        return self._assigned

    def partition_count(self) -> int:
        """Number of partitions of the topics; UnknownPlaceError if one does not exist."""
        run = self._reader.run
        counts = {
            topic: self._store.partition_count(broker_topic(topic, run=run))
            for topic in self._topics
        }
        if 0 in counts.values():
            raise UnknownPlaceError(f"a topic of group {self.group} does not exist: {counts}")
        if len(set(counts.values())) != 1:
            raise ValueError(f"topics of group {self.group} are not co-partitioned: {counts}")
        return next(iter(counts.values()))

    async def revoke(self) -> None:
        """Give up all partitions; returns after the callback."""
        revoked, self._assigned = self._assigned, frozenset()
        self._reader.assign({})
        if revoked:
            await self._on_revoked(revoked)

    async def assign(self, numbers: frozenset[int]) -> None:
        """Take these partitions; the first record is read after the callback has returned."""
        if numbers:
            await self._on_assigned(numbers)
        self._assigned = numbers
        if not self._has_records:
            return
        places = [Place(topic, number) for topic in self._topics for number in sorted(numbers)]
        self._reader.assign({place: self._start(place) for place in places})

    def _start(self, place: Place) -> int:
        on_broker = broker_place(place, run=self._reader.run)
        committed = self._store.positions.get((self.group, on_broker))
        return self._store.partition(on_broker).first if committed is None else committed

    async def read(
        self, *, timeout_s: float, records_max: int, bytes_max: int = READ_BYTES_MAX
    ) -> list[Record]:
        """Records in offset order per partition; [] if none came within the time."""
        return await self._reader.read(
            timeout_s=timeout_s, records_max=records_max, bytes_max=bytes_max
        )

    def position(self, place: Place) -> int:
        """Offset of the next record that `read` returns for the partition."""
        return self._reader.position(place)

    def seek(self, place: Place, position: int) -> None:
        """Continue from this position."""
        self._reader.seek(place, position)

    def pause(self, places: Sequence[Place]) -> None:
        """Return no records of these partitions until `resume`."""
        self._reader.pause(places)

    def resume(self, places: Sequence[Place]) -> None:
        """Undo `pause`."""
        self._reader.resume(places)

    async def close(self) -> None:
        """Leave the group; idempotent."""
        if not self.is_closed:
            self.is_closed = True
            await self._groups.leave(self)
            await self._reader.close()
