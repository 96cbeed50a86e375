"""Follows the gateway's topics: those of the run, and those of the partitions that it owns.

A client gets a completion when it comes back from finished-completions, never earlier: the record
on the log is the reply.
"""

from collections.abc import Collection, Coroutine, Mapping, Sequence
from functools import partial

from forgemq_bus.log import Log, Place, Reader
from forgemq_gateway.applying import Applying
from forgemq_gateway.context import GatewayContext
from forgemq_gateway.feed_topics import CONSUMES, FOLLOWED, FOLLOWED_FROM_NOW, URGENT
from forgemq_gateway.marks import FIRST_RECORDS

__all__ = ["CONSUMES", "Feed"]

# A read returns as soon as a record comes; the wait only bounds how long an idle read lasts, and so
# when partitions that were added are read.
_READ_S = 0.2

# A second of records on a busy run; other tasks run between two reads.
_RECORDS_MAX = 500


class Feed:
    """Reads on from where `Restore` ended; partitions may come and go while it follows."""

    def __init__(self, log: Log, *, applying: Applying, context: GatewayContext) -> None:
        self.first_read: dict[Place, int] = {}
        """How far each of `FIRST_RECORDS` was read and applied."""
        part = partial(_Part, log, applying=applying, context=context)
        self._urgent = part(first_read={}, gathers=False)
        self._others = part(first_read=self.first_read, gathers=True)

    def add(self, positions: Mapping[Place, int]) -> None:
        """Follow these partitions too."""
        self.first_read |= {p: at for p, at in positions.items() if p.topic in FIRST_RECORDS}
        self._urgent.add({p: at for p, at in positions.items() if p.topic in URGENT})
        self._others.add({p: at for p, at in positions.items() if p.topic not in URGENT})

    def drop(self, numbers: Collection[int]) -> None:
        """Follow these group partitions no longer."""
        places = [
            Place(topic.name, number)
            for topic in (*FOLLOWED, *FOLLOWED_FROM_NOW)
            for number in numbers
        ]
        self._urgent.drop(places)
        self._others.drop(places)

    def following(self) -> Sequence[Coroutine[None, None, None]]:
        """What has to run side by side to apply new records, each until it is cancelled."""
        return (self._urgent.follow(), self._others.follow())


class _Part:
    """Partitions that one reader reads."""

    def __init__(
        self,
        log: Log,
        *,
        applying: Applying,
        context: GatewayContext,
        first_read: dict[Place, int],
        gathers: bool,
    ) -> None:
        self._log = log
        self._applying = applying
        self._registry = context.registry
        self._read_back = context.read_back
        self._first_read = first_read
        self._gathers = gathers
        self._positions: dict[Place, int] = {}
        self._added: dict[Place, int] = {}
        self._has_other_places = False

    def add(self, positions: Mapping[Place, int]) -> None:
        """Follow these partitions too."""
        if positions:
            self._added |= positions
            self._has_other_places = True

    def drop(self, places: Collection[Place]) -> None:
        """Follow these partitions no longer."""
        for place in places:
            self._positions.pop(place, None)
            self._added.pop(place, None)
        self._has_other_places = True

    async def follow(self) -> None:
        """Apply new records until cancelled."""
        while True:
            self._has_other_places = False
            self._positions |= self._added
            self._added.clear()
            reader = await self._log.reader(self._positions, gathers=self._gathers)
            try:
                await self._read_on(reader)
            finally:
                await reader.close()

    async def _read_on(self, reader: Reader) -> None:
        """Apply new records until other partitions are to be read."""
        places = list(self._positions)
        while not self._has_other_places:
            await self._read_back.note({place: reader.position(place) for place in places})
            records = await reader.read(timeout_s=_READ_S, records_max=_RECORDS_MAX)
            for record in records:
                # A partition that was lost a record ago is another gateway's.
                if record.place in self._positions:
                    await self._applying.apply(record)
            if self._gathers:  # Groups come and go in what is gathered.
                for place in self._first_read:
                    self._first_read[place] = reader.position(place)
                self._registry.forget_retired()
        self._positions |= {
            place: reader.position(place) for place in places if place in self._positions
        }
