"""Commits for the whole run where a start begins to read: the owner of partition 0 does it."""

import asyncio
from functools import partial

from forgemq_bus.errors import FINAL_ERRORS, FencedError, LogError, LogUnavailableError
from forgemq_bus.log import Log, Place
from forgemq_bus.partitions import partitions_of
from forgemq_contracts import topics
from forgemq_gateway import ownership
from forgemq_gateway.applying import OWNERS_CHANGED
from forgemq_gateway.bad_records import RUN_PARTITION
from forgemq_gateway.context import GatewayContext
from forgemq_gateway.feed import Feed
from forgemq_gateway.marks import Marks
from forgemq_gateway.members import Members
from forgemq_gateway.ownership import KeptKeys
from forgemq_gateway.restore import Restore

_WAIT_S = 60.0
"""Between two looks if no change of owners is heard; each change is."""


class RunMarks:
    """Keeps marks while this gateway serves partition 0. Every gateway knows all open groups."""

    def __init__(
        self,
        log: Log,
        *,
        feed: Feed,
        restore: Restore,
        members: Members,
        context: GatewayContext,
    ) -> None:
        self._log = log
        self._feed = feed
        self._restore = restore
        self._members = members
        self._context = context
        self._requested = partitions_of(topics.REQUESTED_GROUPS, context.configuration)

    async def keep(self) -> None:
        """Commit until cancelled, while it is this gateway's task."""
        while True:
            await self._wait(until=True)
            try:
                marks = await self._marks()
            except FINAL_ERRORS:
                raise
            except LogError as error:
                self._context.telemetry.event("needed_failed", error=str(error))
                await asyncio.sleep(self._context.settings.mark_every_s)
                continue
            marking = self._context.tasks.create_task(marks.keep())
            try:
                await self._wait(until=False)
            finally:
                marking.cancel()

    async def _wait(self, *, until: bool) -> None:
        """Wait until this gateway serves partition 0, or until it does not."""
        serving = self._context.gateways.serving

        def look() -> bool | None:
            return True if (RUN_PARTITION in serving) is until else None

        while look() is None:
            await self._context.changed.until(look, group_id=OWNERS_CHANGED, timeout_s=_WAIT_S)

    async def _marks(self) -> Marks:
        # What the previous owner has committed holds for every group that is open now.
        starts = await self._restore.starts()
        reports = Place(topics.REPORTED_GATEWAYS.name, 0)
        ends = await self._log.end_positions([reports, *self._restore.places_from_now()])
        tail = await ownership.tail_start(self._log)
        context = self._context
        kept = KeptKeys(
            self._members.owners,
            asked=context.registry.asked,
            known=context.gateways.record,
        )
        return Marks(
            self._log,
            starts={**starts, **ends, ownership.PLACE: tail},
            first_read=self._feed.first_read,
            open_groups=context.registry.groups,
            every_s=context.settings.mark_every_s,
            telemetry=context.telemetry,
            keep_known=partial(self._keep_known, kept),
        )

    async def _keep_known(self, kept: KeptKeys) -> None:
        try:
            await kept.write_due(
                read_before=[self._feed.first_read[place] for place in self._requested]
            )
        except FencedError as error:
            raise LogUnavailableError("the owners changed at the same moment") from error
