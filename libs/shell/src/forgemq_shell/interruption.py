"""Ends long work and waits early: at a stop, and with pauses in which a stop can arrive."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

Result = TypeVar("Result")

_TURN_S = 0.02
"""Longest run without a pause: short beside a heartbeat of group membership (1 s)."""


async def ends_before(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work`, but cancel it at the stop; returns whether it came to its end.

    A stop that is set already lets it run up to its first wait at most.
    """
    return not (await _ended(stop, work)).cancelled()


async def result_before(stop: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result | None:
    """As `ends_before`; returns what `work` does, and None if it did not come to its end."""
    ended = await _ended(stop, work)
    return None if ended.cancelled() else ended.result()


async def wait_at_most(event: asyncio.Event, timeout_s: float) -> None:
    """Return when the event is set, or after this time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


async def _ended(
    stop: asyncio.Event, work: Coroutine[Any, Any, Result]
) -> "asyncio.Future[Result]":
    """The task of `work`, which has ended or was cancelled; raises its error."""
    # Not in a task group: an error of `work` leaves here as it is.
    working = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        working.cancel()
        await asyncio.wait([working])
        failure = None if working.cancelled() else working.exception()
    if failure is not None:
        raise failure
    return working


class Turns:
    """Lets other tasks of the event loop have their turn while one computes for long.

    Heartbeats of group membership run on the same event loop and must not starve.
    """

    def __init__(self) -> None:
        self._clock_s = asyncio.get_running_loop().time
        self._since_s = self._clock_s()

    async def give(self) -> None:
        """Pause if the last pause is long ago."""
        if self._clock_s() - self._since_s > _TURN_S:
            await asyncio.sleep(0)
            self._since_s = self._clock_s()
