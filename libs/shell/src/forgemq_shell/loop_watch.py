"""Says from outside whether a service still works: the age of a file.

The loops of a service say when they turn. While every one of them has turned lately, and the event
loop turns, the file is touched. A supervisor that finds it old restarts the process: its event loop
is blocked, or one of its loops waits for something that never comes.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from forgemq_telemetry.telemetry import Telemetry

TOUCH_EVERY_S = 5.0
"""A probe that allows a minute then misses no touch on a busy machine."""


class LoopWatch:
    """When each loop of a service last turned.

    Example: a loop calls `beat("member")` whenever it turns, and `end("member")` when it ends. Work
    that may rightly take minutes, such as a restore or a step, is no loop and is not watched.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._turned_s: dict[str, float] = {}

    def beat(self, loop: str) -> None:
        """Note that this loop turned."""
        self._turned_s[loop] = self._clock_s()

    def end(self, loop: str) -> None:
        """Expect no further turn of this loop until it beats again."""
        self._turned_s.pop(loop, None)

    def silent(self, *, silent_s_max: float) -> tuple[str, ...]:
        """Loops that did not turn for longer than this, by name."""
        oldest_s = self._clock_s() - silent_s_max
        return tuple(sorted(name for name, at_s in self._turned_s.items() if at_s < oldest_s))


async def keep_alive_file(
    path: Path,
    loop_watch: LoopWatch,
    telemetry: Telemetry,
    *,
    silent_s_max: float,
    every_s: float = TOUCH_EVERY_S,
) -> None:
    """Touch the file while every loop turns, until cancelled; name those that stopped, once.

    A file that cannot be touched, on a full disk or in a folder that is gone, ends no service.
    """
    said: tuple[str, ...] = ()
    refusal = ""
    while True:
        silent = loop_watch.silent(silent_s_max=silent_s_max)
        if not silent:
            was, refusal = refusal, _touched(path)
            if refusal and refusal != was:
                telemetry.event("alive_file_refused", error=refusal)
        elif silent != said:
            telemetry.event("silent", loops=list(silent), limit_s=silent_s_max)
        said = silent
        await asyncio.sleep(every_s)


def _touched(path: Path) -> str:
    """Touch the file; returns why that failed, "" if it did not."""
    try:
        path.touch()
    except OSError as error:
        return str(error)
    return ""
