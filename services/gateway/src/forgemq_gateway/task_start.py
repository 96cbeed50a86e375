"""Starts what runs beside a request, unless the gateway ends at this moment."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from forgemq_gateway.core.errors import busy

Result = TypeVar("Result")


def start_task(tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """The task of this work in the gateway's group.

    Raises:
        RefusedError: 503, an error elsewhere ends the gateway, and its group takes no more tasks.
    """
    try:
        return tasks.create_task(work)
    except RuntimeError as error:
        work.close()
        raise busy("this gateway has ended: ask again", status=503) from error
