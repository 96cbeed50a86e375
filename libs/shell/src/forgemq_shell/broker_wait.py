"""Waits for a broker that is still starting."""

import asyncio
import time
from collections.abc import Callable

from forgemq_bus.errors import LogUnavailableError
from forgemq_bus.log import Log
from forgemq_contracts.topics import STARTED_RUNS

_RETRY_S = 0.5
"""Between two tries: short beside a broker's start of seconds."""


async def wait_for_broker(log: Log, *, timeout_s: float, say: Callable[[str], None]) -> None:
    """Return when the broker takes topics; the one of all runs' records is there then.

    Args:
        log: Its calls end with LogUnavailableError long before `timeout_s`.
        timeout_s: For the whole wait; at least one try is made.
        say: Gets what failed, after every try.

    Raises:
        LogUnavailableError: no broker answered within `timeout_s`.
        AccessError: the broker refuses this process.
        LogError: the broker refuses the topic.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            await log.create_topics({STARTED_RUNS.name: 1})
        except LogUnavailableError as error:
            if time.monotonic() >= deadline_s:
                raise LogUnavailableError(
                    f"no broker answered within {timeout_s:g} s: is it up, and is FORGEMQ_KAFKA "
                    f"right? ({error})"
                ) from error
            say(str(error))
        else:
            return
        await asyncio.sleep(_RETRY_S)
