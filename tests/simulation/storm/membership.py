"""Consumer groups as the broker keeps them: a member that does not answer loses its partitions.

Each join, leave or expulsion takes all partitions from all members and gives them out again. A
member that stands still does not notice: it is a zombie until it wakes.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING

from forgemq_bus.log import Place, Record, Subscription
from forgemq_bus.memory_groups import assigned_range
from forgemq_bus.memory_reader import MemoryReader
from forgemq_bus.names import broker_place, broker_topic

if TYPE_CHECKING:
    from tests.simulation.storm.process import Process

SESSION_S = 3.0
"""Both the session and the rebalance timeout; shorter than on Kafka, for short schedules."""

_LONGEST_READ_S = 1.0
"""A member without records to read wakes at most this seldom: polls cost CPU time, not truth."""


class Coordinator:
    """The broker's side of all groups."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._members: dict[str, list[StormMember]] = {}
        self._gates: dict[str, asyncio.Lock] = {}

    def start(self, work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        """Run a callback or a rebalance; `close` cancels it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """End what waits for processes that were killed."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def join(self, member: "StormMember") -> None:
        """Add a member; returns when every member that answers has its new partitions."""
        async with self._gate(member.group):
            self._of(member.group).append(member)
            await self._rebalance(member.group)

    async def leave(self, member: "StormMember") -> None:
        """Remove a member; its partitions go to the others."""
        async with self._gate(member.group):
            await member.revoke()
            if member in self._of(member.group):
                self._of(member.group).remove(member)
                await self._rebalance(member.group)

    def expel(self, member: "StormMember") -> None:
        """Drop a member that sent no heartbeat for the session timeout, if it still is one."""
        if not member.is_closed and not member.process.is_awake():
            self.start(self._expel(member))

    async def _expel(self, member: "StormMember") -> None:
        async with self._gate(member.group):
            if member in self._of(member.group):
                self._drop(member)
                await self._rebalance(member.group)

    def _drop(self, member: "StormMember") -> None:
        member.is_dropped = True
        self._of(member.group).remove(member)

    async def _rebalance(self, group: str) -> None:
        revoking = {self.start(_revoke(member)): member for member in self._of(group)}
        if revoking:
            _, late = await asyncio.wait(revoking, timeout=SESSION_S)
            for task in late:
                self._drop(revoking[task])
        members = self._of(group)
        for index, member in enumerate(members):
            count = member.partition_count()
            member.assign(assigned_range(count, index=index, members=len(members)))

    def _of(self, group: str) -> "list[StormMember]":
        return self._members.setdefault(group, [])

    def _gate(self, group: str) -> asyncio.Lock:
        return self._gates.setdefault(group, asyncio.Lock())


async def _revoke(member: "StormMember") -> None:
    """Ask a member to give up its partitions; a killed one never answers."""
    try:
        await member.revoke()
    except Exception:  # noqa: BLE001 - only KilledError, which `process` defines
        await asyncio.Event().wait()


class StormMember:
    """Implements `log.Member` for one process, with the callbacks' order of `KafkaMember`."""

    def __init__(
        self, reader: MemoryReader, subscription: Subscription, *, process: "Process"
    ) -> None:
        self.process = process
        self.group = subscription.group
        self.is_dropped = False
        self.is_closed = False
        self._reader = reader
        self._topics = subscription.topics
        self._on_assigned = subscription.on_assigned
        self._on_revoked = subscription.on_revoked
        self._has_records = subscription.has_records
        self._assigned: frozenset[int] = frozenset()
        self._told: frozenset[int] = frozenset()
        self._assignment = 0
        self._paused: frozenset[Place] = frozenset()
        self._taking: asyncio.Task[None] | None = None
        self._revoking = asyncio.Lock()
        self._changed = asyncio.Event()
        self._failure: Exception | None = None

    def assigned(self) -> frozenset[int]:
        """Partition numbers that this member owns, as far as it knows."""
        return self._assigned

    def partition_count(self) -> int:
        """Partitions of its topics."""
        return self._reader.store.partition_count(
            broker_topic(self._topics[0], run=self._reader.run)
        )

    async def revoke(self) -> None:
        """Give up all partitions.

        Raises:
            KilledError: the process is killed.
        """
        self.process.check_alive()
        try:
            async with self._revoking:
                await self.process.pass_gate()
                if self._taking is not None:
                    await asyncio.wait([self._taking])
                    self._taking = None
                self._assignment += 1
                told, self._told, self._assigned = self._told, frozenset(), frozenset()
                self._reader.assign({})
                if told:
                    await self._on_revoked(told)
        except Exception as error:  # noqa: BLE001 - `read` raises it, as KafkaMember does
            self._fail(error)
        self.process.check_alive()

    def assign(self, numbers: frozenset[int]) -> None:
        """Start reading these partitions once the callback has returned."""
        self._taking = self.process.coordinator.start(self._take(numbers))

    async def _take(self, numbers: frozenset[int]) -> None:
        try:
            await self.process.pass_gate()
            if numbers:
                self._told = numbers
                await self._on_assigned(numbers)
            self._assigned = numbers
            if self._has_records:
                places = [Place(topic, n) for topic in self._topics for n in sorted(numbers)]
                self._reader.assign({place: self._start(place) for place in places})
            self._changed.set()
        except Exception as error:  # noqa: BLE001 - `read` raises it, as KafkaMember does
            self._fail(error)

    def _start(self, place: Place) -> int:
        on_broker = broker_place(place, run=self._reader.run)
        store = self._reader.store
        return store.positions.get((self.group, on_broker), store.partition(on_broker).first)

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._changed.set()

    async def read(self, *, timeout_s: float, records_max: int) -> list[Record]:
        """Records of the assigned partitions; joins again if the group has dropped the member."""
        await self.process.pass_gate()
        if self._failure is not None:
            raise self._failure
        if self.is_dropped:
            await self.revoke()
            self.is_dropped = False
            await self.process.coordinator.join(self)
        if self._paused >= set(self._reader._positions):
            self._changed.clear()
            try:
                async with asyncio.timeout(_LONGEST_READ_S):
                    await self._changed.wait()
            except TimeoutError:
                return []
            return []
        records = await self._reader.read(timeout_s=timeout_s, records_max=records_max)
        assignment = self._assignment
        if records:
            await self.process.reach("read")
        # What was read for an assignment that ended while the process stood still is not returned.
        return records if assignment == self._assignment else []

    def position(self, place: Place) -> int:
        """Offset of the next record that `read` returns for the partition."""
        return self._reader.position(place)

    def seek(self, place: Place, position: int) -> None:
        """Continue from this position."""
        self._reader.seek(place, position)

    def pause(self, places: Sequence[Place]) -> None:
        """Return no records of these partitions until `resume`."""
        self._paused |= set(places)
        self._reader.pause(places)

    def resume(self, places: Sequence[Place]) -> None:
        """Undo `pause`."""
        self._paused -= set(places)
        self._reader.resume(places)

    async def close(self) -> None:
        """Leave the group; a killed process does not."""
        if not self.is_closed:
            self.is_closed = True
            if not self.process.is_killed:
                await self.process.coordinator.leave(self)
            await self._reader.close()
