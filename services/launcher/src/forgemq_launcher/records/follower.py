"""Reads a run's topics into its live state; the panel and the report show what is here."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from forgemq_audit import guarantees
from forgemq_audit.guarantees import Ledger
from forgemq_bus.errors import BlobError, OutOfRangeError
from forgemq_bus.kept_records import message_of, pass_trimmed, read_from
from forgemq_bus.log import Log, Place, Record
from forgemq_bus.partitions import partitions_of
from forgemq_contracts.groups import MergedGroup, RetiredGroup
from forgemq_contracts.requested_end import RequestedEnd
from forgemq_contracts.run import StartedRun
from forgemq_contracts.topics import AUDITED_GROUPS
from forgemq_launcher.core.failing_groups import FailingGroups
from forgemq_launcher.records.lane_follower import ApplyLanes, follow_lanes
from forgemq_launcher.records.run_end import end_requested
from forgemq_run_view import view
from forgemq_run_view.state import RunState
from forgemq_run_view.view import RunView
from forgemq_shell.clock import now_ms

GROUPS_CHECKED_EVERY_S = 1.0
"""Retired and merged groups are separate topics: between two checks a reader gets through both, so
that a merged group counts before the failures read ahead of it end the run."""
_READ_TIMEOUT_S = 0.25
"""Longest wait of one read; short against the second between two looks at the panel."""
_RECORDS_MAX = 2000
"""Records of one read: applied without an await, in some 10 ms, while the panel stands still."""


class GroupsFailingError(Exception):
    """The groups of a domain fail one after the other; the message names the newest and why."""


class Follower:
    """Follows a run from its first record on.

    Lifecycle: `catch_up` and one task `follow` until cancelled, in turn; each goes on where the
    other ended. `view` and `ledger` may be read between its awaits. A record that does not decode
    is left to its own reader, which writes the dead letter.

    Args:
        log: Of the run.
        started: The run's newest record.
        groups_failed_max: See `LauncherSettings`.
        without_blobs: Called once, if the blob store cannot be reached: from then on records whose
            values lie there are left out. None: the `BlobError` is raised.
    """

    def __init__(
        self,
        log: Log,
        started: StartedRun,
        *,
        groups_failed_max: int = 0,
        without_blobs: Callable[[BlobError], None] | None = None,
    ) -> None:
        self._log = log
        self._without_blobs = without_blobs
        self._has_blobs = True
        self._started = started
        self._configuration = started.configuration
        self.view = RunView(started)
        self.ledger = Ledger(started.configuration)
        self.failing = FailingGroups(
            started.configuration.queues,
            groups_max=groups_failed_max,
            since_ms=started.started_ms,
        )
        self._next: dict[Place, int] = {}

    def state(self) -> RunState:
        """The run as it is now."""
        return self.view.state(now_ms=now_ms())

    @property
    def is_trained(self) -> bool:
        """Whether the last step of the run is trained."""
        state = self.state()
        return state.steps_trained >= state.steps

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

    async def follow_lanes(self, apply: ApplyLanes) -> None:
        """Apply the run's plan of lanes whenever it changes, until cancelled."""
        await follow_lanes(self._log, self._configuration.log, apply=apply)

    async def end_requested(self) -> RequestedEnd:
        """Return once somebody has asked this start of the run to end."""
        return await end_requested(self._log, self._started)

    async def watch_groups(self) -> None:
        """Check the groups until cancelled.

        Raises:
            GroupsFailingError: too many of one domain failed in a row.
        """
        while True:
            if verdict := self.failing.verdict():
                raise GroupsFailingError(verdict)
            await asyncio.sleep(GROUPS_CHECKED_EVERY_S)

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
        wanted = {topic.name: topic for topic in (*view.TOPICS, *guarantees.TOPICS)}
        return [p for topic in wanted.values() for p in partitions_of(topic, self._configuration)]

    def _apply(self, records: Iterable[Record]) -> None:
        for record in records:
            self._next[record.place] = record.offset + 1
            try:
                message = message_of(record)
            except msgspec.MsgspecError:
                continue
            match message.record:
                case RetiredGroup() as retired:
                    self.failing.count_retired(retired, at_ms=message.timestamp_ms)
                case MergedGroup() as merged:
                    self.failing.count_merged(merged, at_ms=message.timestamp_ms)
            self.view.apply(message)
            self.ledger.apply(message)
