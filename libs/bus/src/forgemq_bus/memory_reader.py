"""Reads partitions of a `MemoryStore` from explicit positions."""

import asyncio
from collections.abc import Mapping, Sequence

from forgemq_bus.errors import ClosedError
from forgemq_bus.log import READ_BYTES_MAX, Isolation, Place, Record
from forgemq_bus.memory_store import MemoryStore
from forgemq_bus.names import broker_place
from forgemq_bus.payloads import Values


class MemoryReader:
    """Implements `log.Reader`."""

    def __init__(
        self,
        store: MemoryStore,
        positions: Mapping[Place, int],
        *,
        run: str,
        isolation: Isolation = "committed",
        values: Values,
    ) -> None:
        """A reader of exactly these partitions."""
        self.store = store
        self.run = run
        self._positions = dict(positions)
        self._places = self._broker_places()
        self._among = frozenset(self._places.values())
        self._isolation = isolation
        self._values = values
        self._paused: set[Place] = set()
        self.is_closed = False

    def assign(self, positions: Mapping[Place, int]) -> None:
        """Read these partitions instead; what is paused stays paused."""
        self._positions = dict(positions)
        self._places = self._broker_places()
        self._among = frozenset(self._places.values())
        self.store.wake()

    def _broker_places(self) -> dict[Place, Place]:
        return {place: broker_place(place, run=self.run) for place in self._positions}

    async def read(
        self, *, timeout_s: float, records_max: int, bytes_max: int = READ_BYTES_MAX
    ) -> list[Record]:
        """Records in offset order per partition; [] if none came within the time."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            if self.is_closed:
                raise ClosedError("read after close")
            found, positions = self._collect(records_max)
            previous = {place: self._positions[place] for place in positions}
            taken = self._values.fitting(found, bytes_max)
            for record in reversed(found[len(taken) :]):
                positions[record.place] = record.offset
            records = await self._values.fetch(taken)
            if any(self._positions.get(place) != previous[place] for place in previous):
                continue  # `seek` or `assign` was called while the blobs were fetched.
            self._positions.update(positions)
            if records:
                return records
            left_s = deadline - asyncio.get_running_loop().time()
            if left_s <= 0:
                return []
            await self.store.wait_for_arrival(left_s, among=self._among)

    def _collect(self, records_max: int) -> tuple[list[Record], dict[Place, int]]:
        """Records and the positions after them; moves partitions that had some to the back."""
        found: list[Record] = []
        positions: dict[Place, int] = {}
        partitions = self.store.partitions
        for place, position in list(self._positions.items()):
            if place in self._paused or len(found) == records_max:
                continue
            on_broker = self._places[place]
            there = partitions.get(on_broker)
            if there is not None and there.first + len(there.entries) == position:
                continue  # Most have nothing new, and a call for each would cost more than this.
            records, after = self.store.collect(
                on_broker,
                position,
                isolation=self._isolation,
                records_max=records_max - len(found),
            )
            if after == position:
                continue
            positions[place] = after
            found += records
            if records:
                self._positions[place] = self._positions.pop(place)
        return found, positions

    def position(self, place: Place) -> int:
        """Offset of the next record that `read` returns for the partition."""
        return self._positions[place]

    def seek(self, place: Place, position: int) -> None:
        """Continue from this position."""
        if place not in self._positions:
            raise KeyError(place)
        self._positions[place] = position
        self.store.wake()

    def pause(self, places: Sequence[Place]) -> None:
        """Return no records of these partitions until `resume`."""
        self._paused.update(places)

    def resume(self, places: Sequence[Place]) -> None:
        """Undo `pause`."""
        self._paused.difference_update(places)
        self.store.wake()

    async def close(self) -> None:
        """Release what it holds; idempotent."""
        self.is_closed = True
        self.store.wake()
