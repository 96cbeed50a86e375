"""An event loop whose time jumps to the next timer when it is idle, as trio's autojump clock.

For tests whose waits are all on the loop's time: polls and sleeps cost nothing, and timers still
fire in their order. A folder's conftest chooses it for its async tests:

    from tests.autojump import pytest_asyncio_loop_factories

While a thread or a child process of the loop works, time passes as on any loop. Other clocks do not
jump: a test that waits until `time.monotonic` has moved is marked `wall_clock`.
"""

import asyncio
import selectors
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

import pytest
import uvloop

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

_QUIET_S = 0.001
"""Data on its way through a local socket arrives within this time."""


class AutojumpSelector(selectors.EpollSelector):
    """Waits for files for at most `_QUIET_S`; the rest of a wait is skipped and counted."""

    def __init__(self) -> None:
        super().__init__()
        self.jumped_s = 0.0
        self.threads_running = 0
        self.children: list[asyncio.SubprocessTransport] = []

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait as the parent class does, but skip the time after `_QUIET_S`."""
        if timeout is None or timeout <= _QUIET_S or self._is_waiting_for_others():
            return super().select(timeout)
        ready = super().select(_QUIET_S)
        if not ready:
            self.jumped_s += timeout - _QUIET_S
        return ready

    def _is_waiting_for_others(self) -> bool:
        self.children = [child for child in self.children if child.get_returncode() is None]
        return bool(self.threads_running or self.children)


class AutojumpLoop(asyncio.SelectorEventLoop):
    """A loop on that selector; its time is ahead of the machine's by the time skipped."""

    def __init__(self) -> None:
        self._autojump = AutojumpSelector()
        super().__init__(self._autojump)

    def time(self) -> float:
        """The loop's time in seconds, with the skipped time."""
        return super().time() + self._autojump.jumped_s

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Arguments], Result], *args: *Arguments
    ) -> asyncio.Future[Result]:
        """Run a function in a thread; no time is skipped until it is done."""
        future = super().run_in_executor(executor, func, *args)
        self._autojump.threads_running += 1
        future.add_done_callback(self._thread_done)
        return future

    def _thread_done(self, _: asyncio.Future[Any]) -> None:
        self._autojump.threads_running -= 1

    async def subprocess_exec(self, *args: Any, **kwargs: Any) -> Any:
        """Start a child process; no time is skipped until it has ended."""
        transport, protocol = await super().subprocess_exec(*args, **kwargs)
        self._autojump.children.append(transport)
        return transport, protocol


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run async tests below this conftest on such a loop, unless marked.

    `wall_clock` tests run on asyncio's loop, `every_loop` tests on it and once more on uvloop.
    """
    if item.get_closest_marker("every_loop"):
        return {"machine": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    if item.get_closest_marker("wall_clock"):
        return {"machine": asyncio.new_event_loop}
    return {"autojump": AutojumpLoop}
