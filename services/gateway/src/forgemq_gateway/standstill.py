"""Whether this process stood still, so that others may have taken over what it owned.

A process that is stopped, or gets no CPU, does not report that it is there, and the run's other
gateways take over its groups. When it goes on, requests lie in its sockets, and it may read them
before the log. A turn that it began then would be sampled without what the new owner has answered
meanwhile, and for no client. So until every change of owners that was made by then is read, no
request that comes is served, and nothing is written about the turns of those that came before: they
may wait at the gate, for the rest of a body, or for a lane.
"""

import asyncio
import math

from forgemq_bus.errors import FINAL_ERRORS, LogError
from forgemq_gateway import ownership
from forgemq_gateway.clock import Clock
from forgemq_gateway.ownership import ReadBack

MISSED_S = 1.0
"""A gateway whose tick is later than this may be missed. A report is due each second and others
wait 3 s for it, which leaves one second for a report that is slow itself."""


class Standstill:
    """Told of every tick; asked for every request, and for what is written about every turn.

    Example: the last tick was 1.2 s ago, so a request waits. The next tick says that the process
    goes on; `catch_up` reads the owners; then the request is served.
    """

    def __init__(self, *, read_back: ReadBack, clock: Clock) -> None:
        self._read_back = read_back
        self._clock = clock
        self._ticked_s = math.inf
        self._count = 0
        self._known_count = 0
        self._has_caught_up = asyncio.Condition()

    @property
    def is_behind(self) -> bool:
        """Whether it has gone on, and owners are to be read."""
        return self._known_count < self._count

    def may_be_missed(self) -> bool:
        """Whether others may own by now what this process takes for its own."""
        return self.is_behind or self._clock.now_s() - self._ticked_s > MISSED_S

    def tick(self) -> None:
        """Note that the process runs; before the first tick nothing is missed."""
        now_s = self._clock.now_s()
        if now_s - self._ticked_s > MISSED_S:
            self._count += 1
        self._ticked_s = now_s

    async def catch_up(self) -> None:
        """Read who owns what by now; if the log does not answer, it is to be called again."""
        count = self._count
        try:
            await self._read_back.until_now([ownership.PLACE])
        except FINAL_ERRORS:
            raise
        except LogError:
            return
        async with self._has_caught_up:
            self._known_count = count
            self._has_caught_up.notify_all()

    async def is_over(self) -> None:
        """Return when this process knows who owns what."""
        async with self._has_caught_up:
            await self._has_caught_up.wait_for(lambda: not self.may_be_missed())
