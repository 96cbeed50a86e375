"""Reads a run's topics into its live state; the panel and the report show what is here."""

from collections import deque
from collections.abc import Iterable, Mapping

import msgspec

from forgemq_bus.errors import OutOfRangeError
from forgemq_bus.log import Log, Place, Reader, Record
from forgemq_bus.partitions import partitions_of
from forgemq_contracts.groups import MergedGroup, RetiredGroup
from forgemq_contracts.run import StartedRun
from forgemq_contracts.topics import AUDITED_GROUPS
from forgemq_launcher.core.failing import FailingGroups
from forgemq_run_view import audit, view
from forgemq_run_view.audit import Ledger
from forgemq_run_view.reading import message_of, pass_trimmed, read_from
from forgemq_run_view.view import RunView

BAD_RECORDS_KEPT_MAX = 100
_READ_S = 0.25
_RECORDS_MAX = 2000


class Follower:
    """Follows a run from its first record on.

    Lifecycle: one task runs `follow` until cancelled; `view` and `ledger` may be read between
    its awaits. Records that do not decode are counted and skipped: their readers dead-letter them.
    """

    def __init__(self, log: Log, started: StartedRun, *, groups_failed_max: int = 0) -> None:
        self._log = log
        self._configuration = started.configuration
        self.view = RunView(started)
        self.ledger = Ledger(started.configuration)
        self.failing = FailingGroups(
            started.configuration.queues,
            groups_max=groups_failed_max,
            since_ms=started.started_ms,
        )
        self._ends: dict[Place, int] = {}
        self.bad_records: deque[str] = deque(maxlen=BAD_RECORDS_KEPT_MAX)

    async def follow(self) -> None:
        """Apply every record, old and new; runs until cancelled."""
        reader = await self._reader()
        try:
            while True:
                try:
                    self._apply(await reader.read(timeout_s=_READ_S, records_max=_RECORDS_MAX))
                except OutOfRangeError:
                    await pass_trimmed(self._log, reader, self._places())
        finally:
            await reader.close()

    async def catch_up(self) -> None:
        """Apply every record that is on the log now, from the first, and none that comes after.

        All topics end at one moment: what a record speaks of was written before it.
        """
        await self._catch_up(await self._log.first_positions(self._places()))

    async def catch_up_on_audits(self) -> None:
        """Apply the audits that came since `catch_up`, and nothing else."""
        audits = partitions_of(AUDITED_GROUPS, self._configuration)
        await self._catch_up({place: self._ends[place] for place in audits})

    async def _catch_up(self, starts: Mapping[Place, int]) -> None:
        ends = await self._log.end_positions(list(starts))
        async for records in read_from(self._log, starts, ends=ends):
            self._apply(record for record in records if record.offset < ends[record.place])
        self._ends |= ends

    async def _reader(self) -> Reader:
        return await self._log.reader(await self._log.first_positions(self._places()))

    def _places(self) -> list[Place]:
        wanted = {topic.name: topic for topic in (*view.TOPICS, *audit.TOPICS)}
        return [p for topic in wanted.values() for p in partitions_of(topic, self._configuration)]

    def _apply(self, records: Iterable[Record]) -> None:
        for record in records:
            try:
                message = message_of(record)
            except msgspec.MsgspecError as error:
                self.bad_records.append(
                    f"{record.topic}/{record.partition}@{record.offset}: {error}"
                )
                continue
            match message.record:
                case RetiredGroup() as retired:
                    self.failing.retired(retired, at_ms=message.timestamp_ms)
                case MergedGroup() as merged:
                    self.failing.merged(merged, at_ms=message.timestamp_ms)
            self.view.apply(message)
            self.ledger.apply(message)
