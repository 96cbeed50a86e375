"""A log that holds what a recording holds, and can only be read."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from forgemq_bus.log import READ_BYTES_MAX, Isolation, Place, Record
from forgemq_shell.recording import RecordedPartition, RecordedRecord, Recording, RecordingError


class RecordedLog:
    """Implements `log.LogReads`; a partition that is not in the recording is empty."""

    def __init__(self, recording: Recording) -> None:
        self._partitions = {
            Place(part.topic, part.partition): part for part in recording.partitions
        }

    async def reader(
        self,
        positions: Mapping[Place, int],
        *,
        isolation: Isolation = "committed",
        has_values: bool = True,
        gathers: bool = False,
    ) -> "RecordedReader":
        """A reader of exactly these partitions, from these positions."""
        # Only committed records were recorded, each with its value.
        del isolation, has_values, gathers
        return RecordedReader({place: self._part(place) for place in positions}, positions)

    async def values(self, records: Sequence[Record]) -> list[Record]:
        """The same records: each was recorded with its value."""
        return list(records)

    async def first_positions(self, places: Sequence[Place]) -> dict[Place, int]:
        """Offset of the oldest record that was recorded."""
        return {place: self._part(place).first for place in places}

    async def end_positions(
        self, places: Sequence[Place], *, isolation: Isolation = "committed"
    ) -> dict[Place, int]:
        """Offset behind the newest record that was recorded."""
        del isolation
        return {place: self._part(place).end for place in places}

    def _part(self, place: Place) -> RecordedPartition:
        empty = RecordedPartition(
            topic=place.topic, partition=place.partition, first=0, end=0, records=()
        )
        return self._partitions.get(place, empty)


class RecordedReader:
    """Implements `log.Reader`; never waits, because no record will be added."""

    def __init__(
        self, parts: Mapping[Place, RecordedPartition], positions: Mapping[Place, int]
    ) -> None:
        self._parts = parts
        self._positions = dict(positions)
        self._paused: set[Place] = set()

    async def read(
        self, *, timeout_s: float, records_max: int, bytes_max: int = READ_BYTES_MAX
    ) -> list[Record]:
        """Records of one partition in offset order; [] at the end of one without records.

        Raises:
            RecordingError: every partition that is not paused was read to its end.
        """
        # A recording is in memory as a whole.
        del timeout_s, bytes_max
        is_at_end = True
        for place, part in self._parts.items():
            position = self._positions[place]
            if place in self._paused or position >= part.end:
                continue
            is_at_end = False
            index = bisect_left(part.records, position, key=lambda record: record.offset)
            taken = part.records[index : index + records_max]
            is_rest = index + len(taken) == len(part.records)
            self._positions[place] = part.end if is_rest else taken[-1].offset + 1
            if taken:
                return [_record(place, recorded) for recorded in taken]
        if is_at_end:
            names = ", ".join(map(str, sorted(set(self._parts) - self._paused)))
            raise RecordingError(f"the recording has no more records of {names}")
        return []

    def position(self, place: Place) -> int:
        """Offset of the next record that `read` returns for the partition."""
        return self._positions[place]

    def seek(self, place: Place, position: int) -> None:
        """Continue from this position."""
        self._positions[place] = position

    def pause(self, places: Sequence[Place]) -> None:
        """Return no records of these partitions until `resume`; keep their positions."""
        self._paused.update(places)

    def resume(self, places: Sequence[Place]) -> None:
        """Undo `pause`."""
        self._paused.difference_update(places)

    async def close(self) -> None:
        """Nothing is held open."""


def _record(place: Place, recorded: RecordedRecord) -> Record:
    return Record(
        topic=place.topic,
        partition=place.partition,
        offset=recorded.offset,
        timestamp_ms=recorded.timestamp_ms,
        key=recorded.key,
        value=recorded.value,
        headers=recorded.headers,
    )
