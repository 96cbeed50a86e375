"""An event loop whose time jumps to the next timer when nobody has work, as trio's autojump clock.

For tests in which every wait is on the loop's own time: what a poll or a sleep would wait for costs
nothing, and timers still fire in their order. A folder's conftest chooses it for its async tests:

    from tests.autojump import pytest_asyncio_loop_factories

While a thread or a child process of the loop works, time passes as on any loop. It does not know of
other clocks: what waits until `time.monotonic` has moved is marked `wall_clock`.
"""

import asyncio
import selectors
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

import pytest

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

_QUIET_S = 0.001
"""What is on its way through a local socket arrives within this time."""


class AutojumpSelector(selectors.EpollSelector):
    """Waits for files, but at most `_QUIET_S`: the rest of a wait is skipped, and counted."""

    def __init__(self) -> None:
        super().__init__()
        self.jumped_s = 0.0
        self.threads_running = 0
        self.children: list[asyncio.SubprocessTransport] = []

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As of the parent, but for the skipped time."""
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
    """The loop on such a selector; its time runs ahead of the machine's by what was skipped."""

    def __init__(self) -> None:
        self._autojump = AutojumpSelector()
        super().__init__(self._autojump)

    def time(self) -> float:
        """Seconds, with the skipped ones."""
        return super().time() + self._autojump.jumped_s

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Arguments], Result], *args: *Arguments
    ) -> asyncio.Future[Result]:
        """As of the parent; no time is skipped until the thread is done."""
        future = super().run_in_executor(executor, func, *args)
        self._autojump.threads_running += 1
        future.add_done_callback(self._thread_done)
        return future

    def _thread_done(self, _: asyncio.Future[Any]) -> None:
        self._autojump.threads_running -= 1

    async def subprocess_exec(self, *args: Any, **kwargs: Any) -> Any:
        """As of the parent; no time is skipped until the child has ended."""
        transport, protocol = await super().subprocess_exec(*args, **kwargs)
        self._autojump.children.append(transport)
        return transport, protocol


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Async tests under the conftest that has this hook run on such a loop, unless `wall_clock`."""
    if item.get_closest_marker("wall_clock"):
        return {"machine": asyncio.new_event_loop}
    return {"autojump": AutojumpLoop}
