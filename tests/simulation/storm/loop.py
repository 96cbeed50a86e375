"""An event loop without a clock: its time is a number that jumps to the next timer.

Unlike `tests.autojump` it never looks at the machine's clock, sockets or threads. So a simulation
on it does the same thing every time, and costs only the CPU time of its own code.
"""

import asyncio
import itertools
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

STEPS_MAX = 50_000
"""Of one loop; the longest schedules take a tenth. More is a task that spins."""


class StuckError(Exception):
    """Nothing is left that could ever happen."""


STEP_S = 1e-6
"""Time that one step of the loop takes: a wait too short to change the time would never end."""


class VirtualSelector(selectors.SelectSelector):
    """Waits for nothing: a wait of n seconds adds n to the time."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self._steps = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Skip the wait.

        Raises:
            StuckError: the wait would have no end, or the loop has none.
        """
        self._steps += 1
        if self._steps > STEPS_MAX:
            self._steps = 0  # The tasks still have to be cancelled.
            raise StuckError(f"more than {STEPS_MAX} steps at {self.now_s:.1f} s")
        if timeout is None:
            raise StuckError("no task can run and no timer is set")
        self.now_s += max(STEP_S, timeout)
        return []


class NumberedFuture(asyncio.Future[Any]):
    """A future whose place in a set depends on its number, not on its address in memory."""

    def __init__(self, number: int, *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.number = number

    def __hash__(self) -> int:
        return self.number


class NumberedTask(asyncio.Task[Any]):
    """A task whose place in a set depends on its number: task groups keep theirs in sets."""

    def __init__(self, number: int, work: Any, **options: Any) -> None:
        self.number = number
        super().__init__(work, **options)

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop on that selector; the order in which it does things is the same in every process."""

    def __init__(self) -> None:
        self._virtual = VirtualSelector()
        self._numbers = itertools.count()
        super().__init__(self._virtual)
        self.set_task_factory(self._numbered_task)

    def create_future(self) -> NumberedFuture:
        """A future with the next number."""
        return NumberedFuture(next(self._numbers), loop=self)

    def _numbered_task(
        self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any
    ) -> NumberedTask:
        return NumberedTask(next(self._numbers), work, loop=loop, **options)

    def time(self) -> float:
        """Seconds skipped so far."""
        return self._virtual.now_s


def run_virtual(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine on a fresh virtual loop to its end."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
