"""Finds the record with a run's configuration on the log."""

import asyncio
import time
from collections.abc import Callable

import msgspec

from forgemq_bus.decoding import decoded_record
from forgemq_bus.errors import AccessError, LogError, LogUnavailableError
from forgemq_bus.kept_records import read_all
from forgemq_bus.log import Log, Place, Record
from forgemq_contracts.run import StartedRun
from forgemq_contracts.topics import STARTED_RUNS

_PLACE = Place(STARTED_RUNS.name, 0)
_RETRY_S = 0.5
"""Between two looks: short beside a service's start of seconds."""


SAY_AFTER_S = 5.0
"""A broker on the same machine answers within 2 s, and a run's record is there by then."""

SAY_EVERY_S = 30.0
"""Some lines in the time that a service waits, and not one a second."""


class RunNotStartedError(Exception):
    """No StartedRun of this run came onto the log within the time."""


class UnreadableRunError(Exception):
    """The run's newest record does not decode; the text names it, and what is wrong with it."""


async def started_run(
    log: Log,
    run: str,
    *,
    timeout_s: float,
    clock_s: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = lambda _cause: None,
) -> StartedRun:
    """Read the newest StartedRun of this run id; waits until there is one.

    Args:
        log: With any broker, also one that is still starting.
        run: Id of the run.
        timeout_s: For the whole wait.
        clock_s: Measures it.
        say: Gets what is missing after `SAY_AFTER_S`, and then every `SAY_EVERY_S`.

    Raises:
        RunNotStartedError: none came within `timeout_s`; its cause is the log's last failure.
        AccessError: the broker refuses this process.
        UnreadableRunError: as `newest_start`.
    """
    deadline_s = clock_s() + timeout_s
    missing = _Missing(say, next_s=clock_s() + SAY_AFTER_S)
    while clock_s() < deadline_s:
        try:
            found, failure = await newest_start(log, run), None
        except AccessError:
            raise  # Waiting cannot correct a setting.
        except LogError as error:
            # The launcher creates the topic, perhaps after this process started.
            found, failure = None, error
        if found is not None:
            return found
        missing.note(failure, at_s=clock_s())
        await asyncio.sleep(_RETRY_S)
    raise RunNotStartedError(missing.explained(run, timeout_s=timeout_s)) from missing.failure


class _Missing:
    """What a service that waits for its run still lacks."""

    def __init__(self, say: Callable[[str], None], *, next_s: float) -> None:
        self._say = say
        self._next_s = next_s
        self.failure: LogError | None = None

    def note(self, failure: LogError | None, *, at_s: float) -> None:
        """Take in what a look found in place of the record, and say it if it is time."""
        self.failure = failure
        if at_s >= self._next_s:
            self._say("the run has no record yet" if failure is None else str(failure))
            self._next_s = at_s + SAY_EVERY_S

    def explained(self, run: str, *, timeout_s: float) -> str:
        """Why the wait ended without a run."""
        if isinstance(self.failure, LogUnavailableError):
            return (
                f"no broker answered within {timeout_s:g} s, so run {run!r} cannot start: is it "
                f"up, and is FORGEMQ_KAFKA right? ({self.failure})"
            )
        return (
            f"no record of run {run!r} on {STARTED_RUNS.name} within {timeout_s:g} s: is the run "
            "id right and was the run started on this broker?"
        )


async def newest_start(log: Log, run: str) -> StartedRun | None:
    """Read the newest StartedRun of the run that is on the log; None if it is not there yet.

    Raises:
        UnreadableRunError: it is not a record that this release can read.
    """
    newest: Record | None = None
    async for records in read_all(log, [_PLACE]):
        for record in records:
            if record.key == run.encode():
                newest = record
    if newest is None:
        return None
    try:
        started = decoded_record(newest)
    except msgspec.ValidationError as error:
        raise UnreadableRunError(
            f"the newest record of run {run!r} ({newest.topic}, offset {newest.offset}) does not "
            f"decode: {error}; a later release of ForgeMQ may have started the run"
        ) from error
    assert isinstance(started, StartedRun)
    return started
