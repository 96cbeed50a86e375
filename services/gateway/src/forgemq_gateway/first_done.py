"""Waits for the first of a few futures, with less bookkeeping than asyncio.wait has."""

import asyncio
from collections.abc import Iterable
from typing import Any


async def first_done(futures: Iterable["asyncio.Future[Any]"], *, timeout_s: float) -> None:
    """Return when one of these is done or the time is over; none of them is cancelled."""
    loop = asyncio.get_running_loop()
    woken = loop.create_future()

    def wake(_: object = None) -> None:
        if not woken.done():
            woken.set_result(None)

    timer = loop.call_later(max(0.0, timeout_s), wake)
    waited = tuple(futures)
    for future in waited:
        future.add_done_callback(wake)
    try:
        await woken
    finally:
        timer.cancel()
        for future in waited:
            future.remove_done_callback(wake)
