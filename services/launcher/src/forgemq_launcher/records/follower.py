"""A run on its log for `forgemq run`: its live state, and what may end it early."""

import asyncio
from collections.abc import Callable

from forgemq_audit.run_reader import RunReader
from forgemq_bus.errors import BlobError
from forgemq_bus.log import Log
from forgemq_contracts.groups import MergedGroup, RetiredGroup
from forgemq_contracts.messages import Message
from forgemq_contracts.requested_end import RequestedEnd
from forgemq_contracts.run import StartedRun
from forgemq_launcher.core.failing_groups import FailingGroups
from forgemq_launcher.records.lane_follower import ApplyLanes, follow_lanes
from forgemq_launcher.records.run_end import end_requested
from forgemq_run_view.state import RunState
from forgemq_run_view.view import RunView
from forgemq_shell.clock import now_ms

GROUPS_CHECKED_EVERY_S = 1.0
"""Retired and merged groups are separate topics: between two checks a reader gets through both, so
that a merged group counts before the failures read ahead of it end the run."""


class GroupsFailingError(Exception):
    """The groups of a domain fail one after the other; the message names the newest and why."""


class Follower:
    """Follows a run from its first record on.

    Lifecycle: that of `RunReader`, whose records it counts besides.

    Args:
        log: Of the run.
        started: The run's newest record.
        groups_failed_max: See `LauncherSettings`.
        without_blobs: As of `RunReader`.
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
        self._started = started
        self._reader = RunReader(
            log, started, applied=self._count, without_blobs=without_blobs, has_ledger=False
        )
        self.failing = FailingGroups(
            started.configuration.queues,
            groups_max=groups_failed_max,
            since_ms=started.started_ms,
        )

    @property
    def view(self) -> RunView:
        """What the records add up to."""
        return self._reader.view

    def state(self) -> RunState:
        """The run as it is now."""
        return self.view.state(now_ms=now_ms())

    @property
    def is_trained(self) -> bool:
        """Whether the last step of the run is trained."""
        return self.view.is_trained

    async def follow(self) -> None:
        """Apply every record, old and new, until cancelled."""
        await self._reader.follow()

    async def catch_up(self) -> None:
        """Apply what is on the log at this moment and not applied yet, and nothing later."""
        await self._reader.catch_up()

    async def follow_lanes(self, apply: ApplyLanes) -> None:
        """Apply the run's plan of lanes whenever it changes, until cancelled."""
        await follow_lanes(self._log, self._started.configuration.log, apply=apply)

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

    def _count(self, message: Message) -> None:
        match message.record:
            case RetiredGroup() as retired:
                self.failing.count_retired(retired, at_ms=message.timestamp_ms)
            case MergedGroup() as merged:
                self.failing.count_merged(merged, at_ms=message.timestamp_ms)
            case _:
                pass
