"""Wakes everybody who waits for a change, as often as something changes."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


class Pulse:
    """A beat that many tasks wait for."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def beat(self) -> None:
        """Something has changed: all that wait look again."""
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, look: Callable[[], Found | None], *, timeout_s: float) -> Found | None:
        """What `look` finds, looking again at every beat; None when the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                while (found := look()) is None:
                    await self._event.wait()
                return found
        except TimeoutError:
            return look()
