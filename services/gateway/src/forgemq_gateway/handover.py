"""What a gateway does when another one has taken its run over: it answers its clients, and ends."""

import asyncio
from collections.abc import Iterable

import uvicorn

from forgemq_gateway.core.errors import busy
from forgemq_gateway.dispatcher import Dispatcher
from forgemq_gateway.feed import Feed
from forgemq_gateway.operations import Operations
from forgemq_gateway.ownership import ReplacedError


class Handover:
    """Follows the log as the owner of the run, for as long as this gateway is the owner.

    The turns go on: nothing is cancelled, and a client that asks the new owner again continues
    its own. So a client that waits here gets an error that names the new owner.
    """

    def __init__(
        self, server: uvicorn.Server, *, dispatcher: Dispatcher, operations: Operations
    ) -> None:
        self._server = server
        self._dispatcher = dispatcher
        self._operations = operations
        self._replaced: ReplacedError | None = None

    async def follow(self, feed: Feed, *, owners: Iterable[asyncio.Task[None]]) -> None:
        """Apply new records until cancelled, or until another gateway owns the run.

        `owners` are the tasks of an owner: they write records, so they end before the clients do.
        """
        try:
            await feed.follow()
        except ReplacedError as error:
            self._replaced = error
            for task in owners:
                task.cancel()
            self._dispatcher.refuse_waiting(busy(str(error), status=503))
            self._operations.answer_long_polls()
            self._server.should_exit = True

    def check(self) -> None:
        """Return if nobody has taken the run over.

        Raises:
            ReplacedError: another gateway has.
        """
        if self._replaced is not None:
            raise self._replaced
