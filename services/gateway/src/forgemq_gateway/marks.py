"""Commits from where a restart has to read, every now and then, beside everything else.

The log is trimmed by it and nothing more: what fails here ends no gateway and holds up no reply.

Gateways that overlap may commit in any order and however late, for a commit is a fact of the log
and not of its gateway: when it was found, no record of a group without a RetiredGroup lay before
it. It stays one: a retired group does not open again, whoever has read of it; and a group that the
gateway had not entered has its first record behind the mark, so all its records as well. An older
or slower gateway can only be lower than need be, which keeps records a while longer.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TypeAlias

from forgemq_bus.errors import FencedError, LogError
from forgemq_bus.log import Log, Place
from forgemq_contracts import topics
from forgemq_gateway.needed import Mark, Needed
from forgemq_telemetry.telemetry import Telemetry

__all__ = ["ENTERING", "NEEDED_GROUP", "Marks", "take_mark"]

EndPositions: TypeAlias = Callable[[Sequence[Place]], Awaitable[dict[Place, int]]]

ENTERING = frozenset({topics.REQUESTED_GROUPS.name, topics.ADMITTED_GROUPS.name})
"""Where the first record of every group is."""

NEEDED_GROUP = topics.needed_group("gateway")

_RETAKE_ROUNDS = 20
"""A gateway that was fenced takes over again after so many rounds: the newer one may be gone, or
the broker may have aborted a commit that took too long. Two that live do not get in each other's
way more often."""


class Marks:
    """Takes marks and commits what is needed as soon as the feed has passed them.

    Args:
        log: Of the run.
        starts: From where the restart has read each partition that is committed.
        entered: Up to where the feed has entered each partition of `ENTERING`; it goes on writing.
        open_groups: Groups that have not retired; changes with what is entered.
        every_s: Between two marks.
        telemetry: Of this process.
    """

    def __init__(
        self,
        log: Log,
        *,
        starts: Mapping[Place, int],
        entered: Mapping[Place, int],
        open_groups: Collection[str],
        every_s: float,
        telemetry: Telemetry,
    ) -> None:
        self._log = log
        self._entering = [place for place in starts if place.topic in ENTERING]
        self._following = [place for place in starts if place.topic not in ENTERING]
        self._needed = Needed(starts)
        self._entered = entered
        self._open_groups = open_groups
        self._every_s = every_s
        self._telemetry = telemetry

    async def keep(self) -> None:
        """Commit again and again, for ever; what is needed is known through every failure."""
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
        """Commit with one writer until it fails; a writer whose commit has failed is dead."""
        writer = await self._log.transaction_writer(NEEDED_GROUP)
        committed: dict[Place, int] = {}
        try:
            mark = await self._take_mark()
            while True:
                await asyncio.sleep(self._every_s)
                if not self._has_entered(mark):
                    continue
                positions = self._needed.advance(mark, open_groups=self._open_groups)
                if positions != committed:
                    await writer.commit(outputs=(), group=NEEDED_GROUP, positions=positions)
                    committed = positions
                mark = await self._take_mark()
        finally:
            await writer.close()

    def _has_entered(self, mark: Mark) -> bool:
        """Every group whose first record lies before the mark is entered."""
        return all(self._entered[place] >= mark[place] for place in self._entering)

    async def _take_mark(self) -> Mark:
        return await take_mark(
            self._log.end_positions, entering=self._entering, following=self._following
        )


async def take_mark(
    end_positions: EndPositions, *, entering: Sequence[Place], following: Sequence[Place]
) -> Mark:
    """Ends of all partitions, so that a group behind those of `entering` is behind all of them.

    Ends are not read at one moment: a partition whose leader changes may answer seconds later than
    another. So those of the first records come last.
    """
    ends = await end_positions(following)
    return ends | await end_positions(entering)
