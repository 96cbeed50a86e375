"""One gateway's part of the run, from its start: what it reads, what it owns, what it commits."""

import asyncio
from collections.abc import Coroutine, Sequence

from forgemq_bus.log import Log
from forgemq_gateway.applying import Applying
from forgemq_gateway.bad_records import BadRecords
from forgemq_gateway.context import GatewayContext
from forgemq_gateway.core.registry import Parse
from forgemq_gateway.dispatcher import Dispatcher
from forgemq_gateway.feed import Feed
from forgemq_gateway.members import IsGone, Members
from forgemq_gateway.ownership import newest_owners
from forgemq_gateway.restore import Restore
from forgemq_gateway.run_marks import RunMarks


class Replica:
    """Everything between the log and the registry.

    Args:
        is_gone: Whether nobody listens at a URL.
        ready: Set when the gateway serves what it should own.
    """

    def __init__(
        self,
        log: Log,
        *,
        dispatcher: Dispatcher,
        parse: Parse,
        is_gone: IsGone,
        context: GatewayContext,
        ready: asyncio.Event,
    ) -> None:
        self._log = log
        self._tasks = context.tasks
        bad_records = BadRecords(context=context, ready=ready)
        applying = Applying(
            dispatcher=dispatcher, parse=parse, bad_records=bad_records, context=context
        )
        self._restore = Restore(log, applying=applying, context=context)
        self._feed = Feed(log, applying=applying, context=context)
        self._members = Members(
            log,
            feed=self._feed,
            restore=self._restore,
            bad_records=bad_records,
            dispatcher=dispatcher,
            is_gone=is_gone,
            context=context,
            ready=ready,
        )
        self._marks = RunMarks(
            log, feed=self._feed, restore=self._restore, members=self._members, context=context
        )

    async def start(self) -> Sequence[Coroutine[None, None, None]]:
        """Read what every gateway knows, and join; returns what is to run until the end.

        Raises:
            LogError: the log cannot be read.
        """
        self._feed.add(await self._restore.run(await newest_owners(self._log)))
        following = [self._tasks.create_task(part) for part in self._feed.following()]
        await self._members.join()
        return (
            *map(_kept, following),
            self._members.keep_reporting(),
            self._members.keep_owning(),
            self._marks.keep(),
        )

    async def leave(self) -> None:
        """Give what this gateway owns to the others."""
        await self._members.leave()


async def _kept(task: asyncio.Task[None]) -> None:
    """Wait for a task; cancelling this cancels it."""
    await task
