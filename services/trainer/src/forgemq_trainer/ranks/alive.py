"""Touches the file by whose age a supervisor sees that a machine without the first rank works.

On the first rank's machine the service does it (`forgemq_shell.loop_watch`), once it has started.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forgemq_shell.loop_watch import TOUCH_EVERY_S


@contextmanager
def touching(
    file: str, *, until_others_do: bool = False, every_s: float = TOUCH_EVERY_S
) -> Iterator[None]:
    """Touch the file inside this context, by a thread of its own.

    Args:
        file: Its path; "" for none.
        until_others_do: Stop for good as soon as another process has touched it.
        every_s: Time from touch to touch.
    """
    if not file:
        yield
        return
    stop = threading.Event()
    touched = threading.Thread(
        target=_touch, args=(Path(file), stop, until_others_do, every_s), daemon=True
    )
    touched.start()
    try:
        yield
    finally:
        stop.set()
        touched.join()


def _touch(path: Path, stop: threading.Event, until_others_do: bool, every_s: float) -> None:
    while not stop.is_set():
        path.touch()
        own_ns = path.stat().st_mtime_ns
        stop.wait(every_s)
        if until_others_do and path.stat().st_mtime_ns != own_ns:
            return
