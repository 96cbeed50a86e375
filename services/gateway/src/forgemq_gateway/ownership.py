"""Which gateway owns which group partitions: records on owned-runs, each of which names all owners.

A change is one record with the next number, in a transaction that fences every change that began
before it: so each is made in the knowledge of all earlier ones. It needs no word from the previous
owner, so what a dead one had is taken over without a wait. A previous owner that lives serves on
until it reads the record; nothing that it promises can become durable once the new owner has
fenced its writer (`fenced_writer.py`), and the new owner reads what became durable before.

The same records say which groups were ever requested (`AskedKeys`), so that a start need not read
all requests of the run. The owner of partition 0 brings that up to date beside `marks.py`.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from forgemq_bus.bounded_reads import read_up_to
from forgemq_bus.errors import LogUnavailableError
from forgemq_bus.log import Isolation, Log, Place
from forgemq_contracts import topics
from forgemq_contracts.asked_keys import AskedKeys
from forgemq_contracts.messages import Output
from forgemq_contracts.ownership import OwnedRun
from forgemq_gateway.clock import Clock
from forgemq_gateway.core.gateways import Gateways, with_fenced, with_owner
from forgemq_shell.records import emit_of

PLACE = Place(topics.OWNED_RUNS.name, 0)

OWNERS_WRITER = topics.needed_group("gateway-owners")
"""Apart from the writer of marks: a change of owners does not end its commits."""

# Contains the newest record unless many changes before it were aborted: a transaction takes two
# offsets, committed or not.
_TAIL_OFFSETS = 50

_READ_BACK_S = 5.0
"""The feed passes a record within a second, unless the log is away."""

_KEY_BYTES = 256
"""The keys are written again when they have grown by one for each so many bytes they take: a
record of a few hundred bytes now and then, one of the largest size every few thousand keys."""


class ReadBack:
    """How far this gateway has applied the log, for those who must know all that is on it now."""

    def __init__(self, log: Log, *, wait_s: float = _READ_BACK_S) -> None:
        self._log = log
        self._wait_s = wait_s
        self._applied: dict[Place, int] = {}
        self._has_applied = asyncio.Condition()

    async def note(self, positions: Mapping[Place, int]) -> None:
        """Note that everything before these positions is applied."""
        async with self._has_applied:
            self._applied |= positions
            self._has_applied.notify_all()

    async def until_now(
        self,
        places: Sequence[Place],
        *,
        wait_s: float | None = None,
        isolation: Isolation = "committed",
    ) -> None:
        """Return when the feed has applied what is in these partitions now.

        A record that is committed lies behind the end of "committed" as long as a transaction that
        began before it is open: who must know of every such record waits for "uncommitted".

        Raises:
            LogUnavailableError: it did not get that far in time.
        """
        ends = await self._log.end_positions(places, isolation=isolation)

        def is_applied() -> bool:
            return all(self._applied.get(place, 0) >= end for place, end in ends.items())

        try:
            async with asyncio.timeout(wait_s or self._wait_s), self._has_applied:
                await self._has_applied.wait_for(is_applied)
        except TimeoutError as error:
            raise LogUnavailableError("this gateway reads the log too late: ask again") from error


class Owners:
    """Changes who owns what, on the log.

    Args:
        run: Whose partitions.
        gateways: Of this gateway; the feed brings it up to date.
    """

    def __init__(self, log: Log, *, run: str, gateways: Gateways, clock: Clock) -> None:
        self._log = log
        self._run = run
        self._gateways = gateways
        self._clock = clock

    async def take_over(self, partitions: Collection[int]) -> OwnedRun:
        """Own these partitions too; returns the record, which is durable.

        Raises:
            FencedError: another gateway changes the owners at the same moment.
        """
        mine = self._gateways

        def change(record: OwnedRun) -> OwnedRun:
            owners = with_owner(record.owners, partitions, gateway=mine.gateway, url=mine.url)
            return msgspec.structs.replace(record, owners=owners)

        return await self._change(change)

    async def clear(self, fenced: Collection[str]) -> OwnedRun:
        """Note that this gateway has fenced the writers of these; returns the record.

        Raises:
            FencedError: another gateway changes the owners at the same moment.
        """
        mine = self._gateways

        def change(record: OwnedRun) -> OwnedRun:
            owners = with_fenced(record.owners, fenced, gateway=mine.gateway)
            return msgspec.structs.replace(record, owners=owners)

        return await self._change(change)

    async def remember(self, asked: AskedKeys, *, read_before: Sequence[int]) -> OwnedRun:
        """Write the keys of all requested groups that were read before these offsets.

        Raises:
            FencedError: another gateway changes the owners at the same moment.
        """

        def change(record: OwnedRun) -> OwnedRun:
            return msgspec.structs.replace(
                record, asked_keys=asked.to_bytes(), asked_before=tuple(read_before)
            )

        return await self._change(change)

    async def _change(self, change: Callable[[OwnedRun], OwnedRun]) -> OwnedRun:
        writer = await self._log.transaction_writer(OWNERS_WRITER)
        try:
            newest = await newest_owners(self._log)
            numbered = OwnedRun(
                run=self._run,
                owner=1 if newest is None else newest.owner + 1,
                owned_ms=self._clock.wall_ms(),
                url=self._gateways.url,
                asked_keys=b"" if newest is None else newest.asked_keys,
                asked_before=() if newest is None else newest.asked_before,
                owners=() if newest is None else newest.owners,
            )
            record = change(numbered)
            emit = emit_of(Output(topic=PLACE.topic, partition=PLACE.partition, record=record))
            await writer.commit(outputs=[emit], group=OWNERS_WRITER, positions={})
            return record
        finally:
            await writer.close()


class KeptKeys:
    """Writes which groups were ever requested, as often as it is worth its bytes."""

    def __init__(self, owners: Owners, *, asked: AskedKeys, known: OwnedRun | None) -> None:
        self._owners = owners
        self._asked = asked
        self._size_bytes = 0 if known is None else len(known.asked_keys)
        self._written_count = asked.added_count

    async def write_due(self, *, read_before: Sequence[int]) -> None:
        """Write them, unless there is little new.

        Args:
            read_before: How far each partition of requested-groups was read.
        """
        added = self._asked.added_count
        if added - self._written_count <= self._size_bytes // _KEY_BYTES:
            return
        record = await self._owners.remember(self._asked, read_before=read_before)
        self._written_count, self._size_bytes = added, len(record.asked_keys)


async def newest_owners(log: Log) -> OwnedRun | None:
    """The newest record of owners; None if the run had no gateway.

    Looks twice as far back while it finds none: gateways whose changes fail again and again leave
    only offsets without records.
    """
    first = (await log.first_positions([PLACE]))[PLACE]
    end = (await log.end_positions([PLACE]))[PLACE]
    start, newest = end, None
    while newest is None and start > first:
        start = max(first, end - max(_TAIL_OFFSETS, 2 * (end - start)))
        newest = await _newest_between(log, start, end)
    return newest


async def _newest_between(log: Log, start: int, end: int) -> OwnedRun | None:
    reader = await log.reader({PLACE: start})
    newest: OwnedRun | None = None
    try:
        async for records in read_up_to(reader, {PLACE: end}):
            for record in records:
                owned = _decoded(record.value)
                if owned is not None and (newest is None or owned.owner >= newest.owner):
                    newest = owned
    finally:
        await reader.close()
    return newest


def _decoded(value: bytes) -> OwnedRun | None:
    """The record in these bytes; None for a bad one, which is as good as none."""
    try:
        found = topics.decode(topics.OWNED_RUNS, value)
    except msgspec.ValidationError:
        return None
    assert isinstance(found, OwnedRun)
    return found


async def tail_start(log: Log) -> int:
    """From where the newest records of owners are read."""
    first = (await log.first_positions([PLACE]))[PLACE]
    end = (await log.end_positions([PLACE]))[PLACE]
    return max(first, end - _TAIL_OFFSETS)
