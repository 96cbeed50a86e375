"""Finds the record with a run's configuration on the log."""

import asyncio
import time
from collections.abc import Callable

import msgspec

from forgemq_bus.errors import AccessError, LogError
from forgemq_bus.log import Log, Place
from forgemq_contracts.run import StartedRun
from forgemq_contracts.topics import STARTED_RUNS

_PLACE = Place(STARTED_RUNS.name, 0)
_DECODER = msgspec.msgpack.Decoder(StartedRun)
_READ_S = 0.2
"""One wait for records that are on the log: they come at once or the broker is gone."""

_READ_RECORDS_MAX = 1000
"""One read: a broker that serves many runs has one small record of each."""

_RETRY_S = 0.5
"""Between two looks: short beside a service's start of seconds."""


class RunNotStartedError(Exception):
    """No StartedRun of this run came onto the log within the time."""


async def started_run(
    log: Log, run: str, *, timeout_s: float, clock_s: Callable[[], float] = time.monotonic
) -> StartedRun:
    """Read the newest StartedRun of this run id; waits until there is one.

    Raises:
        RunNotStartedError: none came within `timeout_s`; its cause is the log's last failure.
        AccessError: the broker refuses this process.
    """
    deadline_s = clock_s() + timeout_s
    failure: LogError | None = None
    while clock_s() < deadline_s:
        try:
            found = await _read_newest(log, run)
        except AccessError:
            raise  # Waiting cannot correct a setting.
        except LogError as error:
            # The launcher creates the topic, perhaps after this process started.
            found, failure = None, error
        if found is not None:
            return found
        await asyncio.sleep(_RETRY_S)
    raise RunNotStartedError(
        f"no record of run {run!r} on {STARTED_RUNS.name} within {timeout_s:g} s: is the run id "
        "right and was the run started on this broker?"
    ) from failure


async def _read_newest(log: Log, run: str) -> StartedRun | None:
    """Read the newest StartedRun of the run that is on the log; None if it is not there yet."""
    first = (await log.first_positions([_PLACE]))[_PLACE]
    end = (await log.end_positions([_PLACE]))[_PLACE]
    if first >= end:
        return None
    newest = None
    reader = await log.reader({_PLACE: first})
    try:
        while reader.position(_PLACE) < end:
            records = await reader.read(timeout_s=_READ_S, records_max=_READ_RECORDS_MAX)
            if not records:
                break
            for record in records:
                if record.key == run.encode():
                    newest = _DECODER.decode(record.value)
    finally:
        await reader.close()
    return newest
