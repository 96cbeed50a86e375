"""Lets gradings use in turn what only a few can use at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from forgemq_contracts.grading_waits import waiting


@asynccontextmanager
async def in_turn(place: asyncio.Lock | asyncio.Semaphore) -> AsyncIterator[None]:
    """Take the place and give it back; until it is free its grading's time stands still.

    Who has a place must not wait here for another one: nothing would end that wait.
    """
    if place.locked():
        with waiting():
            await place.acquire()
    else:
        await place.acquire()
    try:
        yield
    finally:
        place.release()
