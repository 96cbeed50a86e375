"""What stops a run in order: Ctrl-C and its relatives, or a request; another signal kills."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from forgemq_contracts.requested_end import RequestedEnd
from forgemq_launcher.upkeep.supervisor import Note

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ECHO_S = 1.0
"""One Ctrl-C may arrive twice, from the terminal and passed on by make or a shell, milliseconds
apart. A person who presses it again to kill has read the first answer and takes longer."""

_Result = TypeVar("_Result")


class StopSignal:
    """Lifecycle: `listen` once inside the event loop.

    `event` is set by the first signal, or by a request, which `requested` then holds.
    """

    def __init__(
        self,
        *,
        kill: Callable[[], None],
        note: Note,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.event = asyncio.Event()
        self.requested: RequestedEnd | None = None
        self._killed = asyncio.Event()
        self._kill = kill
        self._note = note
        self._clock_s = clock_s
        self._came_s = 0.0

    def listen(self) -> None:
        """Take over SIGINT, SIGTERM and SIGHUP for this process."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._take_signal)

    def take_request(self, requested: RequestedEnd) -> None:
        """Stop in order because somebody asked for it; without effect once the run stops."""
        if not self.event.is_set():
            self.requested = requested
            self.event.set()
            self._came_s = self._clock_s()
            self._note(f"{asked_text(requested)}; stopping everything, Ctrl-C kills")

    async def wait_unless(self, ended: asyncio.Event) -> None:
        """Return at the first signal, or once `ended` is set."""
        async with asyncio.TaskGroup() as group:
            waits = [group.create_task(event.wait()) for event in (self.event, ended)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

    async def unless_killed(self, work: Awaitable[_Result]) -> _Result | None:
        """What `work` gives; None, and it is cancelled, as soon as a signal has killed everything.

        For work that asks the run's broker, which is dead then: a request waits 30 s for it.
        """
        working = asyncio.ensure_future(work)
        killed = asyncio.ensure_future(self._killed.wait())
        try:
            await asyncio.wait([working, killed], return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            working.cancel()
            killed.cancel()
            await asyncio.gather(working, killed, return_exceptions=True)

    def _take_signal(self) -> None:
        if not self.event.is_set():
            self.event.set()
            self._came_s = self._clock_s()
            self._note("stopping everything; Ctrl-C again kills")
        elif self._clock_s() - self._came_s >= ECHO_S:
            self._kill()
            self._killed.set()


def asked_text(requested: RequestedEnd) -> str:
    """That somebody asked for the end, and why if the asker said so."""
    why = f": {requested.detail}" if requested.detail else ""
    return f"asked to end by `forgemq stop`{why}"
