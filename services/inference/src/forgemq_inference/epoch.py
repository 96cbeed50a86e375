"""The epoch of a lane: one more than any before, fixed by the order of the lane's own records."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from forgemq_bus.bounded_reads import read_up_to
from forgemq_bus.log import Emit, Log, Place, Reader, Record, Writer
from forgemq_contracts import topics
from forgemq_contracts.weights import LoadedWeights, ReportedEngine

FIRST_EPOCH = 1
_TAIL_RECORDS = 200  # Of reported-engines the log keeps more (`Topic.newest_kept`).


class WonEpoch(NamedTuple):
    """A won epoch, and where reading the lane's reports goes on to notice a successor."""

    epoch: int
    position: int


class Tail(NamedTuple):
    """Last records of a partition, oldest first, and the position after them."""

    records: list[Record]
    position: int


async def claim_epoch(
    log: Log, writer: Writer, *, lane: int, report: Callable[[int], Emit]
) -> WonEpoch:
    """Take the lane under a new epoch; of two that try at once the later one wins.

    Args:
        log: of the run.
        writer: for the reports.
        lane: partition of the lane topics.
        report: the first report under an epoch; it must not say that the lane serves.
    """
    reports = Place(topics.REPORTED_ENGINES.name, lane)
    loads = Place(topics.LOADED_WEIGHTS.name, lane)
    end = (await log.end_positions([reports]))[reports]
    known = (await tail(log, reports)).records + (await tail(log, loads)).records
    newest = max((_epoch(record) for record in known), default=FIRST_EPOCH - 1)
    reader = await log.reader({reports: end})
    try:
        while True:
            offset = await writer.write(report(newest + 1))
            rivals = [
                _epoch(record)
                for record in await _up_to(reader, reports, offset)
                if record.offset != offset
            ]
            if max(rivals, default=newest) <= newest:
                return WonEpoch(newest + 1, offset + 1)
            # A rival's report stands before ours: ours would look like its successor's heartbeat.
            newest = max(*rivals, newest + 1)
    finally:
        await reader.close()


async def tail(log: Log, place: Place) -> Tail:
    """The last records of a partition, at most 200."""
    first = (await log.first_positions([place]))[place]
    end = (await log.end_positions([place]))[place]
    start = max(first, end - _TAIL_RECORDS)
    if start >= end:
        return Tail([], end)
    reader = await log.reader({place: start})
    try:
        return Tail(await _up_to(reader, place, end - 1), reader.position(place))
    finally:
        await reader.close()


async def _up_to(reader: Reader, place: Place, offset: int) -> list[Record]:
    batches = read_up_to(reader, {place: offset + 1})
    return [record async for batch in batches for record in batch]


def _epoch(record: Record) -> int:
    """The epoch that a record tells of; that before the first where it does not decode."""
    try:
        decoded = topics.decode(topics.BY_NAME[record.topic], record.value)
    except msgspec.ValidationError:
        return FIRST_EPOCH - 1
    assert isinstance(decoded, ReportedEngine | LoadedWeights)
    return decoded.epoch
