"""Lets many tasks wait for one change."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


class ChangeSignal:
    """A signal that any number of tasks wait for, any number of times."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Let every waiting task look again."""
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, look: Callable[[], Found | None], *, timeout_s: float) -> Found | None:
        """What `look` finds, looking again at every change; None if the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                while (found := look()) is None:
                    await self._event.wait()
                return found
        except TimeoutError:
            return look()
