"""Runs what takes long beside the event loop: bodies to read, histories to tokenise."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# Below this the loop is held for about a millisecond, and a thread would cost more than it saves.
INLINE_SIZE_MAX = 16_384

# One for each core that is there: to tokenise needs no interpreter lock. More would only take the
# event loop's core from it.
_THREADS_MAX = max(2, min(4, os.cpu_count() or 1))


class LargeWork:
    """A few threads for large requests, so that many of them wait for one another and not the loop.

    Example: `await work.run(lambda: read(body), size=len(body))`.
    """

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(_THREADS_MAX, thread_name_prefix=name)

    async def run(self, work: Callable[[], T], *, size: int) -> T:
        """Run the work, in a thread if it is large; returns or raises what it does."""
        if size <= INLINE_SIZE_MAX:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
