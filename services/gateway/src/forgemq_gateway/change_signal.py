"""Lets many tasks wait for a change of one group."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


class ChangeSignal:
    """A signal for each group: any number of tasks wait for it, any number of times.

    Every open group has agents that wait for it, so a change must wake only those it concerns.
    """

    def __init__(self) -> None:
        self._waited: dict[str, _WaitedGroup] = {}

    def notify(self, group_id: str) -> None:
        """Let every task that waits for this group look again."""
        group = self._waited.get(group_id)
        if group is not None:
            group.wake()

    def notify_all(self) -> None:
        """Let every waiting task look again."""
        for group in self._waited.values():
            group.wake()

    async def until(
        self, look: Callable[[], Found | None], *, group_id: str, timeout_s: float
    ) -> Found | None:
        """What `look` finds, looking again when the group changes; None if the time is over."""
        found = look()
        if found is not None:  # Mostly so; a timer would cost more than the look.
            return found
        group = self._waited.setdefault(group_id, _WaitedGroup())
        group.tasks += 1
        try:
            async with asyncio.timeout(timeout_s):
                while found is None:
                    await group.event.wait()
                    found = look()
                return found
        except TimeoutError:
            return look()
        finally:
            group.tasks -= 1
            if not group.tasks:
                del self._waited[group_id]


class _WaitedGroup:
    """The tasks that wait for one group; it is known as long as there are any."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.tasks = 0

    def wake(self) -> None:
        self.event.set()
        self.event = asyncio.Event()
