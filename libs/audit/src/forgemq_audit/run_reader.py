"""Reads the records of a run into its live state and the ledger of its guarantees."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from forgemq_audit import guarantees
from forgemq_audit.guarantees import Ledger
from forgemq_bus.errors import BlobError, OutOfRangeError
from forgemq_bus.kept_records import message_of, pass_trimmed, read_from
from forgemq_bus.log import Log, Place, Record
from forgemq_bus.partitions import partitions_of
from forgemq_contracts.messages import Message
from forgemq_contracts.run import StartedRun
from forgemq_contracts.topics import AUDITED_GROUPS, Topic
from forgemq_run_view import view
from forgemq_run_view.view import RunView

TOPICS: tuple[Topic, ...] = tuple({t.name: t for t in (*view.TOPICS, *guarantees.TOPICS)}.values())
"""What it reads."""
_READ_TIMEOUT_S = 0.25
"""Longest wait of one read; short against the second between two looks at the panel."""
_RECORDS_MAX = 2000
"""Records of one read: applied without an await, in some 10 ms, while the panel stands still."""


class RunReader:
    """Follows a run from its first record on.

    Lifecycle: `catch_up` and one task `follow` until cancelled, in turn; each goes on where the
    other ended. `view` and `ledger` may be read between its awaits. A record that does not decode
    is left to its own reader, which writes the dead letter.

    Args:
        log: Of the run.
        started: The run's newest record.
        applied: Gets each record that decodes, once.
        without_blobs: Called once, if the blob store cannot be reached: from then on records whose
            values lie there are left out. None: the `BlobError` is raised.
        has_ledger: Whether the ledger gets the records. It holds every sample of the run, which a
            process that only shows the run has no use for.
    """

    def __init__(
        self,
        log: Log,
        started: StartedRun,
        *,
        applied: Callable[[Message], None] = lambda _: None,
        without_blobs: Callable[[BlobError], None] | None = None,
        has_ledger: bool = True,
    ) -> None:
        self.view = RunView(started)
        self.ledger = Ledger(started.configuration)
        self._log = log
        self._configuration = started.configuration
        self._applied = applied
        self._without_blobs = without_blobs
        self._has_ledger = has_ledger
        self._has_blobs = True
        self._next: dict[Place, int] = {}

    async def follow(self) -> None:
        """Apply every record, old and new, until cancelled."""
        starts = await self._starts(self._places())
        reader = await self._log.reader(starts, has_values=self._reads_values)
        try:
            while True:
                try:
                    records = await reader.read(timeout_s=_READ_TIMEOUT_S, records_max=_RECORDS_MAX)
                    self._apply(await self._with_values(records))
                except OutOfRangeError:
                    await pass_trimmed(self._log, reader, self._places())
        finally:
            await reader.close()

    async def catch_up(self) -> None:
        """Apply what is on the log at this moment and not applied yet, and nothing later.

        The ends of all topics are taken at one moment: whatever a record refers to was written
        before it, so it is applied too.
        """
        await self._catch_up(await self._starts(self._places()))

    async def catch_up_on_audits(self) -> None:
        """Apply the audits that were written since `catch_up`, and nothing else."""
        audits = partitions_of(AUDITED_GROUPS, self._configuration)
        await self._catch_up({place: self._next[place] for place in audits})

    async def _catch_up(self, starts: Mapping[Place, int]) -> None:
        ends = await self._log.end_positions(list(starts))
        reading = read_from(self._log, starts, ends=ends, has_values=self._reads_values)
        async for records in reading:
            wanted = [record for record in records if record.offset < ends[record.place]]
            self._apply(await self._with_values(wanted))
        self._next |= ends

    async def _starts(self, places: Sequence[Place]) -> dict[Place, int]:
        """Where to go on, or the first record that is kept."""
        first = await self._log.first_positions(places)
        return {place: max(at, self._next.get(place, at)) for place, at in first.items()}

    @property
    def _reads_values(self) -> bool:
        """Whether the log's own readers fetch the values; else `_with_values` does."""
        return self._without_blobs is None

    async def _with_values(self, records: list[Record]) -> list[Record]:
        if self._without_blobs is None or not self._has_blobs:
            return records
        try:
            return await self._log.values(records)
        except BlobError as error:
            self._has_blobs = False
            self._without_blobs(error)
            return records

    def _places(self) -> list[Place]:
        return [place for topic in TOPICS for place in partitions_of(topic, self._configuration)]

    def _apply(self, records: Iterable[Record]) -> None:
        for record in records:
            self._next[record.place] = record.offset + 1
            try:
                message = message_of(record)
            except msgspec.MsgspecError:
                continue
            self._applied(message)
            self.view.apply(message)
            if self._has_ledger:
                self.ledger.apply(message)
