"""Follows the gateway's topics: those of the run, and those of the partitions that it owns.

A client gets a completion when it comes back from finished-completions, never earlier: the record
on the log is the reply.
"""

from collections.abc import Collection, Mapping

from forgemq_bus.log import Log, Place, Reader
from forgemq_gateway.applying import Applying
from forgemq_gateway.context import GatewayContext
from forgemq_gateway.feed_topics import CONSUMES, FOLLOWED, FOLLOWED_FROM_NOW
from forgemq_gateway.marks import FIRST_RECORDS

__all__ = ["CONSUMES", "Feed"]

# A read returns as soon as a record comes; the wait only bounds how long an idle read lasts.
_READ_S = 1.0

# A second of records on a busy run; other tasks run between two reads.
_RECORDS_MAX = 500


class Feed:
    """Reads on from where `Restore` ended; partitions may come and go while it follows."""

    def __init__(self, log: Log, *, applying: Applying, context: GatewayContext) -> None:
        self._log = log
        self._applying = applying
        self._registry = context.registry
        self._read_back = context.read_back
        self._positions: dict[Place, int] = {}
        self._added: dict[Place, int] = {}
        self._has_other_places = False
        self.first_read: dict[Place, int] = {}
        """How far each of `FIRST_RECORDS` was read and applied."""

    def add(self, positions: Mapping[Place, int]) -> None:
        """Follow these partitions too."""
        self._added |= positions
        self.first_read |= {p: at for p, at in positions.items() if p.topic in FIRST_RECORDS}
        self._has_other_places = True

    def drop(self, numbers: Collection[int]) -> None:
        """Follow these group partitions no longer."""
        for topic in (*FOLLOWED, *FOLLOWED_FROM_NOW):
            for number in numbers:
                self._positions.pop(Place(topic.name, number), None)
                self._added.pop(Place(topic.name, number), None)
        self._has_other_places = True

    async def follow(self) -> None:
        """Apply new records until cancelled."""
        while True:
            self._has_other_places = False
            self._positions |= self._added
            self._added.clear()
            reader = await self._log.reader(self._positions)
            try:
                await self._read_on(reader)
            finally:
                await reader.close()

    async def _read_on(self, reader: Reader) -> None:
        """Apply new records until other partitions are to be read."""
        places = list(self._positions)
        while not self._has_other_places:
            await self._read_back.note(reader.position)
            records = await reader.read(timeout_s=_READ_S, records_max=_RECORDS_MAX)
            self._read_back.begin()
            for record in records:
                # A partition that was lost a record ago is another gateway's.
                if record.place in self._positions:
                    await self._applying.apply(record)
            for place in self.first_read:
                self.first_read[place] = reader.position(place)
            self._registry.forget_retired()
        self._positions |= {
            place: reader.position(place) for place in places if place in self._positions
        }
