"""Which blobs no record points at, and none ever will again.

Symbols: m a blob's minute (when it was put), d the grace, T one moment, U a later moment with
U - T >= d, both taken by this process.

A blob may be deleted if all of this holds:
1. m was over at T. Writers put only into the current minute and write the record right after, or
   give up, also if they stood still in between (`BlobStore.check_fresh`). So every record that
   points at the blob was written before U, if d is longer than their limit and a write together,
   plus the lag of the slowest clock among the writers.
2. Every record that the log held at U, committed or not, was looked at after U. So every record
   that points at the blob and is still on the log is known.
3. Of the records known to point at it, each was already trimmed at T. So a reader that took such a
   record into memory before it was trimmed has had the time d to fetch the blob.

All three stay true once they are: nothing is put into a minute that is over, and trimmed records
do not return. A process that is paused before it deletes is therefore still right afterwards.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Partition = TypeVar("Partition")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMoment(Generic[Partition]):
    """What clock and log showed at one moment.

    Attributes:
        at_s: Monotonic, in seconds.
        minute: The current minute; blobs of earlier ones are complete. Minutes sort by time.
        firsts: Offset of the oldest record that each partition held.
    """

    at_s: float
    minute: str
    firsts: Mapping[Partition, int]


class Sweep(Generic[Partition]):
    """The records that point at blobs, and the blobs that they leave free.

    Lifecycle: take a `LogMoment`, then `add_reference` for every record up to an end of the log
    that was asked for after it, then `complete` the moment; now `free_blobs` answers for it.

    Memory: for each blob that a record on the log points at, one entry of about 250 bytes.

    Example: grace 60, blob m/a is put at 10 s with its record at offset 4, which is trimmed at
    200 s. The moments at 0, 100 and 200 s free nothing. The one at 300 s saw the trim; the one at
    400 s finds it 60 s old and frees m/a.
    """

    def __init__(self, *, grace_s: float) -> None:
        self._grace_s = grace_s
        self._moments: deque[LogMoment[Partition]] = deque()
        self._newest_offsets: dict[Partition, dict[str, int]] = {}
        self._held: frozenset[str] = frozenset()

    def add_reference(self, blob: str, *, partition: Partition, offset: int) -> None:
        """A record at this offset points at the blob `<minute>/<name>`."""
        offsets = self._newest_offsets.setdefault(partition, {})
        offsets[blob] = max(offset, offsets.get(blob, offset))

    def complete(self, moment: LogMoment[Partition]) -> None:
        """Every record that the log held at this moment has been added."""
        self._moments.append(moment)
        while len(self._moments) > 1 and self._is_graced(self._moments[1]):
            self._moments.popleft()
        if self._is_graced(self._moments[0]):
            self._forget(self._moments[0].firsts)
        self._held = frozenset(blob for known in self._newest_offsets.values() for blob in known)

    def is_over(self, minute: str) -> bool:
        """Whether no blob is put into the minute any more and all its records are known."""
        if not self._moments:
            return False
        return self._is_graced(self._moments[0]) and minute < self._moments[0].minute

    def free_blobs(self, minute: str, names: Iterable[str]) -> tuple[str, ...]:
        """Of these files of a minute, those that may be deleted."""
        if not self.is_over(minute):
            return ()
        return tuple(name for name in names if f"{minute}/{name}" not in self._held)

    def _is_graced(self, moment: LogMoment[Partition]) -> bool:
        return self._moments[-1].at_s - moment.at_s >= self._grace_s

    def _forget(self, firsts: Mapping[Partition, int]) -> None:
        """Drop references from records that were trimmed by then."""
        for partition, offsets in self._newest_offsets.items():
            first = firsts[partition]
            gone = [blob for blob, offset in offsets.items() if offset < first]
            for blob in gone:
                del offsets[blob]
