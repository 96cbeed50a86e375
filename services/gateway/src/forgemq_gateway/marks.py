"""Commits from where a restart must read, every few seconds.

The commit decides only what may be trimmed. If it fails, nothing else does: it is an event.

Why a committed position is safe: every record below it belongs to a retired group.
1. All records of a group are written after its first one, which is on one of the `FIRST_RECORDS`.
2. A mark is the end of every partition. Those of `FIRST_RECORDS` are read last, so a group whose
   first record lies behind the mark has all its records behind it.
3. A mark is accepted once the feed has read every first record before it. Each open group keeps
   the newest mark that was accepted before the feed read the group's first record (`OldestMark`).
4. The lowest of these marks is committed, so no record of an open group lies below it.
Retired groups never open again, so a commit stays valid. Several gateways may overlap and commit
in any order, even late: a slow one only commits too low, which keeps records longer.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TypeAlias

from forgemq_bus.errors import FencedError, LogError
from forgemq_bus.log import Log, Place
from forgemq_contracts import topics
from forgemq_gateway.oldest_mark import Mark, OldestMark
from forgemq_telemetry.telemetry import Telemetry

__all__ = ["FIRST_RECORDS", "NEEDED_GROUP", "Marks", "take_mark"]

EndPositions: TypeAlias = Callable[[Sequence[Place]], Awaitable[dict[Place, int]]]

FIRST_RECORDS = frozenset({topics.REQUESTED_GROUPS.name, topics.ADMITTED_GROUPS.name})
"""Topics that hold the first record of every group."""

NEEDED_GROUP = topics.needed_group("gateway")

_RETAKE_ROUNDS = 20
"""A fenced gateway takes the writer back after so many intervals, because the newer gateway may be
gone, or the broker may have aborted a slow commit. Two live gateways so fence each other rarely."""


class Marks:
    """Takes marks, and commits the oldest one that is needed once the feed has passed the newest.

    Args:
        starts: From where the restart has read each partition that is committed.
        first_read: How far the feed has read each of `FIRST_RECORDS`; the feed updates it.
        open_groups: Groups that have not retired; the feed updates it.
        every_s: Seconds between two marks.
        keep_known: Called before a commit: writes what a start could not read any more after it.
    """

    def __init__(
        self,
        log: Log,
        *,
        starts: Mapping[Place, int],
        first_read: Mapping[Place, int],
        open_groups: Collection[str],
        every_s: float,
        telemetry: Telemetry,
        keep_known: Callable[[], Awaitable[None]],
    ) -> None:
        self._log = log
        self._first = [place for place in starts if place.topic in FIRST_RECORDS]
        self._other = [place for place in starts if place.topic not in FIRST_RECORDS]
        self._oldest = OldestMark(starts)
        self._first_read = first_read
        self._open_groups = open_groups
        self._every_s = every_s
        self._telemetry = telemetry
        self._keep_known = keep_known

    async def keep(self) -> None:
        """Commit until cancelled; a failure is an event, and the marks are kept through it."""
        while True:
            try:
                await self._commit_marks()
            except FencedError as error:
                self._telemetry.event("needed_fenced", error=str(error))
                await asyncio.sleep(_RETAKE_ROUNDS * self._every_s)
            except LogError as error:
                self._telemetry.event("needed_failed", error=str(error))
                await asyncio.sleep(self._every_s)

    async def _commit_marks(self) -> None:
        """Commit with one writer until a commit fails, which ends the writer."""
        writer = await self._log.transaction_writer(NEEDED_GROUP)
        committed: dict[Place, int] = {}
        try:
            mark = await self._take_mark()
            while True:
                await asyncio.sleep(self._every_s)
                if not self._has_read(mark):
                    continue
                positions = self._oldest.accept(mark, open_groups=self._open_groups)
                if positions != committed:
                    await self._keep_known()
                    await writer.commit(outputs=(), group=NEEDED_GROUP, positions=positions)
                    committed = positions
                mark = await self._take_mark()
        finally:
            await writer.close()

    def _has_read(self, mark: Mark) -> bool:
        """Whether the feed has read every first record before the mark."""
        return all(self._first_read[place] >= mark[place] for place in self._first)

    async def _take_mark(self) -> Mark:
        return await take_mark(self._log.end_positions, first=self._first, other=self._other)


async def take_mark(
    end_positions: EndPositions, *, first: Sequence[Place], other: Sequence[Place]
) -> Mark:
    """Take the end of every partition, those with the first records of groups last.

    Ends are not read at one moment: a partition whose leader changes may answer seconds later than
    the others. A group whose first record is behind the `first` ends was written after the `other`
    ends were read, so its records are behind those too.
    """
    ends = await end_positions(other)
    return ends | await end_positions(first)
