"""Deletes blobs that no record of the run points at any more; `core/sweep.py` decides which.

It reads every topic of the run once, from the first record kept, without fetching any blob; then
only what is new. Uncommitted records count too: their transaction may still be committed. Those
of aborted transactions count until they are trimmed, for a reader may read uncommitted.
"""

import time
from collections import Counter
from collections.abc import Callable

import msgspec

from forgemq_auditor.core import LogMoment, Sweep
from forgemq_bus.blobs import BlobStore, blob_name, minute_of
from forgemq_bus.errors import LostBlobError
from forgemq_bus.kept_records import read_from
from forgemq_bus.log import Log, Place, Record
from forgemq_bus.partitions import dead_letters_of, partitions_of
from forgemq_bus.payloads import reference_of, value_bytes
from forgemq_contracts import topics
from forgemq_contracts.run import RunConfiguration


class Swept(msgspec.Struct, frozen=True, kw_only=True):
    """What one round has found and done."""

    kept: int = 0
    kept_bytes: int = 0
    deleted: int = 0
    deleted_bytes: int = 0


class Clocks(msgspec.Struct, frozen=True, kw_only=True):
    """Where time comes from, in seconds.

    Attributes:
        monotonic_s: Measures the grace: a clock that is set may jump.
        wall_s: Since the Unix epoch; names the minute, as writers of blobs do.
    """

    monotonic_s: Callable[[], float] = time.monotonic
    wall_s: Callable[[], float] = lambda: time.time_ns() / 1e9


class BlobSweep:
    """Sweeps the blobs of one run.

    Lifecycle: `sweep` at intervals. A new one knows nothing, so it deletes nothing before
    it has read the whole log and the grace is over.
    """

    def __init__(
        self,
        log: Log,
        blobs: BlobStore,
        *,
        configuration: RunConfiguration,
        grace_s: float,
        clocks: Clocks | None = None,
    ) -> None:
        self._log = log
        self._blobs = blobs
        self._places = places_of_run(configuration)
        self._clocks = clocks or Clocks()
        self._sweep: Sweep[Place] = Sweep(grace_s=grace_s)
        self._next: dict[Place, int] = {}
        self._bytes: Counter[str] = Counter()

    def take_bytes(self) -> dict[str, int]:
        """By topic, the size of the values that were looked at since the last call."""
        taken, self._bytes = self._bytes, Counter()
        return dict(taken)

    async def sweep(self) -> Swept:
        """Look at the records that are new, then delete what is free.

        Raises:
            LogError: log or store do not answer or refuse; some blobs may be deleted already.
        """
        moment = await self._moment()
        if not self._next:
            await self._add_references(dict(moment.firsts))
            # Records that were trimmed while the whole log was read are unknown, and so is when
            # that was: the grace of their blobs begins with the next round.
            return Swept()
        await self._add_references(self._next)
        self._sweep.complete(moment)
        swept = Swept()
        for minute in await self._blobs.list_minutes():
            swept = _sum(swept, await self._sweep_minute(minute))
        return swept

    async def _moment(self) -> LogMoment[Place]:
        minute = minute_of(self._clocks.wall_s())
        firsts = await self._log.first_positions(self._places)
        # Taken last: what the moment says has been so at least since then.
        return LogMoment(at_s=self._clocks.monotonic_s(), minute=minute, firsts=firsts)

    async def _add_references(self, positions: dict[Place, int]) -> None:
        """Look at every record from these positions to the ends of now, also uncommitted ones."""
        ends = await self._log.end_positions(self._places, isolation="uncommitted")
        behind = {place: at for place, at in positions.items() if at < ends[place]}
        async for records in read_from(
            self._log,
            behind,
            ends={place: ends[place] for place in behind},
            isolation="uncommitted",
            has_values=False,
        ):
            for record in records:
                self._add_reference(record)
                self._bytes[record.topic] += value_bytes(record)
                # If the round fails, the next one goes on from here.
                positions[record.place] = record.offset + 1
        # Behind the last record of a partition there may be markers of transactions.
        self._next = {place: max(ends[place], at) for place, at in positions.items()}

    def _add_reference(self, record: Record) -> None:
        try:
            reference = reference_of(record)
            blob = blob_name(reference) if reference else ""
        except (msgspec.MsgspecError, LostBlobError):
            return  # No reader can find a blob by this header.
        if blob:
            self._sweep.add_reference(blob, partition=record.place, offset=record.offset)

    async def _sweep_minute(self, minute: str) -> Swept:
        files = await self._blobs.list_blobs(minute)
        free = frozenset(self._sweep.free_blobs(minute, (file.name for file in files)))
        gone = [file for file in files if file.name in free]
        # The folder of a minute that is not over may be one that a writer has just made.
        if gone or (not files and self._sweep.is_over(minute)):
            await self._blobs.delete(minute, sorted(free))
        deleted_bytes = sum(file.size_bytes for file in gone)
        return Swept(
            kept=len(files) - len(gone),
            kept_bytes=sum(file.size_bytes for file in files) - deleted_bytes,
            deleted=len(gone),
            deleted_bytes=deleted_bytes,
        )


def places_of_run(configuration: RunConfiguration) -> list[Place]:
    """Every partition of every topic of the run, dead letters included."""
    living = [p for topic in topics.OF_RUN for p in partitions_of(topic, configuration)]
    return living + [dead_letters_of(topic) for topic in topics.OF_RUN if topic.has_dlq]


def _sum(left: Swept, right: Swept) -> Swept:
    return Swept(
        kept=left.kept + right.kept,
        kept_bytes=left.kept_bytes + right.kept_bytes,
        deleted=left.deleted + right.deleted,
        deleted_bytes=left.deleted_bytes + right.deleted_bytes,
    )
