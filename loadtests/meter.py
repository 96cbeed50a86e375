"""Counts the CPU time of some coroutines among all those of an event loop."""

import mmap
import time
from collections.abc import Coroutine, Generator
from functools import partial
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")

# To read a thread's CPU clock takes 1 us, or 25 us if the thread has run for a while since the last
# reading. What takes longer than this is no reading: the thread stood still.
_READING_NS_MAX = 100_000

_BYTES = 8


class Meter:
    """The sum for all coroutines of one process, in a file, so that another process can read it.

    Args:
        path: Begins with 0 if there is no such file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            path.write_bytes(bytes(_BYTES))
        with path.open("r+b") as file:
            self._spent_ns = memoryview(mmap.mmap(file.fileno(), _BYTES)).cast("q")

    def cpu_s(self) -> float:
        """CPU time that the coroutines have used so far."""
        return self._spent_ns[0] / 1e9

    async def counting(self, work: Coroutine[None, None, Result]) -> Result:
        """Run a coroutine; each of its steps counts, and what it waits for does not."""
        return await _Steps(work, spent_ns=self._spent_ns)


class _Steps:
    """Awaits a coroutine as `await` does, and measures between its pauses.

    What it takes to measure counts as the coroutine's, since no other work needs it.
    """

    def __init__(self, work: Coroutine[None, None, Result], *, spent_ns: "memoryview[int]") -> None:
        self._work = work
        self._spent_ns = spent_ns

    def __await__(self) -> Generator[object, None, Result]:
        step = partial(self._work.send, None)
        while True:
            reading_ns = time.perf_counter_ns()
            began_ns = time.thread_time_ns()
            reading_ns = min(time.perf_counter_ns() - reading_ns, _READING_NS_MAX)
            try:
                awaited = step()
            except StopIteration as end:
                result: Result = end.value
                return result
            finally:
                self._spent_ns[0] += time.thread_time_ns() - began_ns + reading_ns
            try:
                yield awaited
            except BaseException as error:  # noqa: BLE001 - the coroutine's own to handle
                step = partial(self._work.throw, error)
            else:
                step = partial(self._work.send, None)
