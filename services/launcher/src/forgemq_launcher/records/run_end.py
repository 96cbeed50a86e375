"""Asks a run to end, on its log; reads how it ended, and waits for the request or the end."""

from collections.abc import AsyncIterator

import msgspec

from forgemq_bus.kept_records import messages_of, read_all
from forgemq_bus.log import Log, Place
from forgemq_contracts.messages import Output
from forgemq_contracts.requested_end import RequestedEnd
from forgemq_contracts.run import EndedRun, StartedRun
from forgemq_contracts.run_ends import is_end_of
from forgemq_contracts.topics import ENDED_RUNS, REQUESTED_ENDS
from forgemq_shell.records import emit_of

_REQUESTS = Place(REQUESTED_ENDS.name, 0)
_ENDS = Place(ENDED_RUNS.name, 0)
_READ_TIMEOUT_S = 0.5
"""Longest wait of one read; a record that comes ends it."""
_RECORDS_MAX = 500
"""Both topics have a record for each start of a run at most, and for each time somebody asked."""


async def request_end(log: Log, requested: RequestedEnd) -> None:
    """Ask a start of the run to end."""
    await log.create_topics({REQUESTED_ENDS.name: 1})
    writer = await log.writer()
    await writer.write(emit_of(Output(topic=REQUESTED_ENDS.name, partition=0, record=requested)))


async def end_requested(log: Log, started: StartedRun) -> RequestedEnd:
    """Return once somebody has asked this start of the run to end.

    The topic is made if it is missing: a run of an earlier release has none.
    """
    await log.create_topics({REQUESTED_ENDS.name: 1})
    async for record in _records(log, _REQUESTS):
        if isinstance(record, RequestedEnd) and record.started_ms == started.started_ms:
            return record
    raise AssertionError("a topic has no end")


async def end_of(log: Log, started: StartedRun) -> EndedRun | None:
    """How the newest start of the run ended; None while it is up, or if it was killed."""
    newest: EndedRun | None = None
    async for records in read_all(log, [_ENDS]):
        for message in messages_of(records):
            ended = message.record
            if isinstance(ended, EndedRun) and is_end_of(ended, started):
                newest = ended
    return newest


async def run_ended(log: Log, started: StartedRun) -> EndedRun:
    """Return once this start of the run has ended."""
    async for record in _records(log, _ENDS):
        if isinstance(record, EndedRun) and is_end_of(record, started):
            return record
    raise AssertionError("a topic has no end")


async def _records(log: Log, place: Place) -> AsyncIterator[msgspec.Struct]:
    """Every record of a partition, old and new; one that does not decode is left out."""
    reader = await log.reader(await log.first_positions([place]))
    try:
        while True:
            records = await reader.read(timeout_s=_READ_TIMEOUT_S, records_max=_RECORDS_MAX)
            for message in messages_of(records):
                yield message.record
    finally:
        await reader.close()
