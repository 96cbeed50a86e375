"""One active auditor in a run, any number standing by.

The active one owns partition 0 of retired-groups in the consumer group `auditor`. If a process
stands still, two may be active for a moment. That is safe: audits are fenced by their transaction,
and trim and sweep delete only what no process will need again.
"""

import asyncio
from collections.abc import Callable, Coroutine

from forgemq_contracts.topics import RETIRED_GROUPS
from forgemq_shell.service import Context

Work = Callable[[], Coroutine[None, None, None]]

_GROUP = "auditor"
_MEMBER_READ_S = 0.25
"""At most this long after a signal the process leaves the group."""


async def run_while_active(context: Context, work: Work) -> None:
    """Do the work whenever this process is the active auditor, until the service stops.

    The work ends by itself when the service stops; it is cancelled when another process takes over.

    Raises:
        ExceptionGroup: the work failed.
    """
    async with asyncio.TaskGroup() as group:
        tenure = _Tenure(context, work, group)
        member = await context.log.member(
            group=_GROUP,
            topics=[RETIRED_GROUPS.name],
            on_assigned=tenure.begin,
            on_revoked=tenure.end,
            has_records=False,  # The audit reads the records from its own positions.
        )
        try:
            while not context.stop.is_set():
                context.loop_watch.beat("member")
                await member.read(timeout_s=_MEMBER_READ_S, records_max=1)
            context.loop_watch.end("member")
            await tenure.finish()
        finally:
            await member.close()


class _Tenure:
    """The work of this process while it is the active one."""

    def __init__(self, context: Context, work: Work, group: asyncio.TaskGroup) -> None:
        self._context = context
        self._work = work
        self._group = group
        self._task: asyncio.Task[None] | None = None

    async def begin(self, partitions: frozenset[int]) -> None:
        """Start the work if the partition that stands for it came."""
        if 0 in partitions and self._task is None and not self._context.stop.is_set():
            self._context.telemetry.event("active")
            self._task = self._group.create_task(self._work())

    async def end(self, partitions: frozenset[int]) -> None:
        """Cancel the work if its partition went, and wait until it has ended."""
        if 0 in partitions and self._task is not None and not self._context.stop.is_set():
            self._context.telemetry.event("standing_by")
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def finish(self) -> None:
        """Wait until the work has noticed that the service stops."""
        if self._task is not None:
            await asyncio.wait([self._task])
