"""Reads what a task wrote, batch by batch."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from forgemq_bus.bounded_reads import STALLED_S
from forgemq_bus.errors import LogUnavailableError
from forgemq_bus.log import LogReads, Place, Reader, Record
from forgemq_shell.batch import batch_sequence

_READ_S = 0.5
"""One wait for records; only the stall limit bounds the whole read."""

_RECORDS_MAX = 200
"""Records of one read: outputs of the merger are up to megabytes each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenBatch:
    """What one batch wrote to one partition.

    Attributes:
        records: In order.
        is_partial: Records of the batch before these may have been trimmed away.
    """

    records: tuple[Record, ...]
    is_partial: bool


class WrittenOutputs:
    """Outputs of one task, in the order of its batches.

    Lifecycle: `open`, `read_batch` with rising numbers, `close`. Holds one read ahead of each
    partition; skips records of other writers (a dead letter topic has several).

    Args:
        log: Of the run, or of a recording.
        task: Transactional id of the task, as in its records' header `batch`: `merger-0`.
    """

    def __init__(self, log: LogReads, *, task: str) -> None:
        self._log = log
        self._task = task
        self._reader: Reader | None = None
        self._ends: Mapping[Place, int] = MappingProxyType({})
        self._trimmed: set[Place] = set()
        self._ahead: dict[Place, deque[tuple[int, Record]]] = {}

    async def open(self, places: Sequence[Place]) -> None:
        """Open a reader at the oldest records that are kept; records written later are skipped.

        The ends include open transactions: the markers of one commit reach the partitions at
        different moments, so outputs of a batch in the journal may still lack theirs.
        """
        if not places:
            return
        first = await self._log.first_positions(places)
        self._ends = await self._log.end_positions(places, isolation="uncommitted")
        self._trimmed = {place for place in places if first[place] > 0}
        self._ahead = {place: deque() for place in places}
        self._reader = await self._log.reader(first)
        self._reader.pause(list(places))

    async def read_batch(self, sequence: int) -> dict[Place, WrittenBatch]:
        """Read what this batch wrote, by partition, without those that it surely did not write to.

        Raises:
            LogUnavailableError: the log does not give all it has.
        """
        found: dict[Place, WrittenBatch] = {}
        for place in self._ahead:
            records = await self._read_partition(place, sequence)
            is_partial = place in self._trimmed
            if records or is_partial:
                found[place] = WrittenBatch(records=tuple(records), is_partial=is_partial)
            if records:
                self._trimmed.discard(place)
        return found

    async def _read_partition(self, place: Place, sequence: int) -> list[Record]:
        ahead, found = self._ahead[place], list[Record]()
        while await self._fill(place) and ahead[0][0] <= sequence:
            number, record = ahead.popleft()
            if number < sequence:
                self._trimmed.discard(place)
            else:
                found.append(record)
        return found

    async def _fill(self, place: Place) -> bool:
        """Read until a record of this task is at the front; False if none is left."""
        ahead, reader = self._ahead[place], self._reader
        assert reader is not None, "open comes first"
        deadline_s = time.monotonic() + STALLED_S
        reader.resume([place])
        try:
            while not ahead and reader.position(place) < self._ends[place]:
                records = await reader.read(timeout_s=_READ_S, records_max=_RECORDS_MAX)
                for record in records:
                    number = batch_sequence(record.headers, task=self._task)
                    if number is not None and record.offset < self._ends[place]:
                        ahead.append((number, record))
                if not records and time.monotonic() > deadline_s:
                    raise LogUnavailableError(
                        f"{place}: nothing came at position "
                        f"{reader.position(place)}, the end is {self._ends[place]}"
                    )
        finally:
            reader.pause([place])
        return bool(ahead)

    async def close(self) -> None:
        """Release the connection; idempotent."""
        if self._reader is not None:
            await self._reader.close()
