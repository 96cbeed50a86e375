"""Runs what takes long beside the event loop: bodies to read, histories to tokenise."""

import asyncio
import gc
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# Below this the loop is held for about a millisecond, and a thread would cost more than it saves.
INLINE_SIZE_MAX = 16_384

# One for each core that is there: to tokenise needs no interpreter lock. More would only take the
# event loop's core from it.
_THREADS_MAX = max(2, min(4, os.cpu_count() or 1))


# After this time a thread that works on a large request gives the interpreter to the event loop.
# The loop gives it up at every read and write, several times a request, and each of them would cost
# 5 ms with the value that Python has. Of 60 rounds of 5 writes and reads beside 2 busy threads, the
# slowest took 12 ms with 1 ms here, and 4 ms with this.
_SWITCH_S = 0.0002

# New objects before the collector of reference cycles looks at them, and how often it does so
# before it looks at older ones. With Python's 700 it takes 2 to 12 % more of the gateway's time;
# what a turn leaves behind has no cycles. To look at 5,000 objects takes 0.1 ms.
_COLLECTED_AFTER = (5_000, 10, 10)


def favour_event_loop() -> None:
    """Let no thread of this process hold the interpreter for long.

    The collector of reference cycles looks through all objects whenever many new ones were made,
    as by a large request: 0.1 s for the modules alone, which are left out from here on.
    """
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECTED_AFTER)


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
