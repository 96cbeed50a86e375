"""Calls a function again and again while a block runs."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def called_every(every_s: float, call: Callable[[], None]) -> Iterator[None]:
    """Call this on the event loop, first after the interval, until the block ends."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def again() -> None:
        nonlocal timer
        timer = loop.call_later(every_s, again)
        call()

    timer = loop.call_later(every_s, again)
    try:
        yield
    finally:
        timer.cancel()
