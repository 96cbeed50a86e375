"""One gateway owns a run: the newest one. An older one that is still there ends.

A gateway claims the run before it reads anything else: one record with the next owner number, in a
transaction that fences every older claim. It needs no word from the previous owner, so a restart
after a kill waits for nothing. The previous owner, if it lives, reads the record as soon as it
reads anything, and ends. Until then both serve: the time that one record takes.

The same record tells the next gateway which groups were ever requested (`AskedKeys`), so that it
need not read all requests of the run. It is written again beside the commits of `marks.py`.
"""

import asyncio
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from forgemq_bus.bounded_reads import read_up_to
from forgemq_bus.errors import LogUnavailableError
from forgemq_bus.log import Emit, Log, Place
from forgemq_contracts import topics
from forgemq_contracts.asked_keys import AskedKeys
from forgemq_contracts.messages import Output
from forgemq_contracts.ownership import OwnedRun
from forgemq_gateway.clock import Clock
from forgemq_gateway.marks import NEEDED_GROUP
from forgemq_settings.environment import SettingsError
from forgemq_shell.records import emit_of

PLACE = Place(topics.OWNED_RUNS.name, 0)

# Contains the newest record unless many claims before it were aborted: a transaction takes two
# offsets, committed or not.
_TAIL_OFFSETS = 50

_CONFIRM_S = 5.0
"""The feed passes its own claims within a second, and another owner's never."""

_KEY_BYTES = 256
"""The keys are written again when they have grown by one for each so many bytes they take: a
record of a few hundred bytes with each commit, one of the largest size every few thousand keys."""


class ReplacedError(SettingsError):
    """Another gateway owns the run now.

    A refusal, and so exit status 2: a supervisor that started this one again would only take the
    run back from the other.
    """


class Claimed(Struct, frozen=True, kw_only=True):
    """This gateway's claim, and from where a newer owner would show."""

    record: OwnedRun
    position: int

    def check(self, other: OwnedRun) -> None:
        """Return if this gateway still owns the run.

        Raises:
            ReplacedError: it does not; names the new owner.
        """
        if other.owner > self.record.owner:
            raise ReplacedError(
                f"gateway {other.owner} at {other.url or 'another address'} has taken over run "
                f"{other.run} from this one, number {self.record.owner}: a run has one gateway"
            )


class StandingClaim:
    """Whether this gateway's claim still stood when a record of it became durable.

    A newer owner reads what lies before its own claim, so it does not know a record that became
    durable after it. To promise such a record to a client would promise what the owner forgets.
    """

    def __init__(self, log: Log, *, wait_s: float = _CONFIRM_S) -> None:
        self._log = log
        self._wait_s = wait_s
        self._read_before = 0
        self._has_read = asyncio.Condition()

    async def read_up_to(self, position: int) -> None:
        """Note that the feed has applied every claim before this position."""
        async with self._has_read:
            self._read_before = position
            self._has_read.notify_all()

    async def confirm(self) -> None:
        """Return if no other gateway has claimed the run until now.

        Raises:
            LogUnavailableError: another one has, or the feed did not get that far in time.
        """
        end = (await self._log.end_positions([PLACE]))[PLACE]
        try:
            async with asyncio.timeout(self._wait_s), self._has_read:
                await self._has_read.wait_for(lambda: self._read_before >= end)
        except TimeoutError as error:
            raise LogUnavailableError("another gateway may own the run: ask again") from error


async def claim_run(log: Log, *, run: str, url: str, at_ms: int) -> Claimed:
    """Take the run over from every gateway before; returns the claim, with all that it remembers.

    Raises:
        FencedError: another gateway claims the run at the same moment.
    """
    writer = await log.transaction_writer(NEEDED_GROUP)
    try:
        newest = await _newest(log)
        record = OwnedRun(
            run=run,
            owner=1 if newest is None else newest.owner + 1,
            owned_ms=at_ms,
            url=url,
            asked_keys=b"" if newest is None else newest.asked_keys,
            asked_before=() if newest is None else newest.asked_before,
        )
        await writer.commit(outputs=[_emit(record)], group=NEEDED_GROUP, positions={})
    finally:
        await writer.close()
    # Everything behind our own record: read from before it, since offsets have gaps.
    return Claimed(record=record, position=await _tail_start(log))


class KeptKeys:
    """Writes what the next owner must know, as often as it is worth its bytes."""

    def __init__(self, claimed: Claimed, *, clock: Clock, asked: AskedKeys) -> None:
        self._record = claimed.record
        self._clock = clock
        self._asked = asked
        self._written_count = asked.added_count

    def due(self, *, read_before: Sequence[int]) -> list[Emit]:
        """The record to write beside a commit; empty if there is little new.

        Args:
            read_before: How far each partition of requested-groups was read.
        """
        new_count = self._asked.added_count - self._written_count
        if new_count <= len(self._record.asked_keys) // _KEY_BYTES:
            return []
        self._written_count = self._asked.added_count
        self._record = msgspec.structs.replace(
            self._record,
            owned_ms=self._clock.wall_ms(),
            asked_keys=self._asked.to_bytes(),
            asked_before=tuple(read_before),
        )
        return [_emit(self._record)]


def _emit(record: OwnedRun) -> Emit:
    return emit_of(Output(topic=PLACE.topic, partition=PLACE.partition, record=record))


async def _newest(log: Log) -> OwnedRun | None:
    """The newest owner's newest record; None if the run had no gateway.

    Looks twice as far back while it finds none: a gateway whose claims fail again and again leaves
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


async def _tail_start(log: Log) -> int:
    first = (await log.first_positions([PLACE]))[PLACE]
    end = (await log.end_positions([PLACE]))[PLACE]
    return max(first, end - _TAIL_OFFSETS)
