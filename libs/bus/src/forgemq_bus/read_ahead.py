"""Buffers records that were fetched and not yet handed out, per partition and in order."""

from collections import deque
from collections.abc import Sequence, Set

from forgemq_bus.log import Place, Record


class ReadAhead:
    """A buffer between a reader's fetches and its `read`, bounded by one fetch.

    Example:
        With a0 a1 a2 | b0 inside, `peek(2)` is [a0, a1]; after `drop` of them `peek(9)` is
        [b0, a2]: a partition that was served goes behind the others.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        """An empty buffer for these partitions."""
        self._ahead: dict[Place, deque[Record]] = {place: deque() for place in places}

    def add(self, place: Place, records: Sequence[Record]) -> None:
        """Append the records that were fetched next from this partition."""
        self._ahead[place].extend(records)

    def peek(self, records_max: int, *, without: Set[Place]) -> list[Record]:
        """The records to hand out next, except those of partitions in `without`."""
        taken: list[Record] = []
        for place, records in self._ahead.items():
            if place not in without and records:
                room = records_max - len(taken)
                taken += [records[index] for index in range(min(room, len(records)))]
            if len(taken) == records_max:
                break
        return taken

    def drop(self, records: Sequence[Record]) -> None:
        """Remove records that `peek` returned; their partitions go to the back."""
        places: list[Place] = []
        for record in records:
            self._ahead[record.place].popleft()
            if not places or places[-1] != record.place:
                places.append(record.place)
        for place in places:
            self._ahead[place] = self._ahead.pop(place)

    def clear(self, place: Place) -> None:
        """Drop the records of this partition."""
        self._ahead[place].clear()

    def first_offset(self, place: Place) -> int | None:
        """Offset of the next record to hand out; None if no record of the partition is here."""
        records = self._ahead[place]
        return records[0].offset if records else None
