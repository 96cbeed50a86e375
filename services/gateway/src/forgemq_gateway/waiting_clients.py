"""The clients that wait for an answer: a gateway that ends lets go of all of them."""

import asyncio

from forgemq_gateway.core.errors import ending


class WaitingClients:
    """Futures that are done when a client's connection is closed (`connections.LEFT`).

    A gateway that ends by an error answers nobody, because nothing wakes its requests any more.
    Their clients get a 503, or the end of a stream, and ask the gateway that takes over.
    """

    def __init__(self) -> None:
        self._leaving: set[asyncio.Future[None]] = set()
        self._has_ended = False

    def check(self) -> None:
        """Return if clients may still wait here.

        Raises:
            RefusedError: 503, the gateway has ended.
        """
        if self._has_ended:
            raise ending()

    def add(self, leaving: "asyncio.Future[None]") -> None:
        """Count a client that begins to wait."""
        self._leaving.add(leaving)

    def discard(self, leaving: "asyncio.Future[None]") -> None:
        """Count it no more."""
        self._leaving.discard(leaving)

    async def follow(self) -> None:
        """Until cancelled, do nothing; then let go of every client."""
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._has_ended = True
            for leaving in [each for each in self._leaving if not each.done()]:
                leaving.set_result(None)
