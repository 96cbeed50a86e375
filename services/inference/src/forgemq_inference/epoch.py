"""The epoch of a lane: higher than every earlier one, by the order of records on the log.

Two processes that claim a lane at once both write a report; the order of the two reports in their
partition decides, so both reach the same verdict.
"""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from forgemq_bus.bounded_reads import read_up_to
from forgemq_bus.decoding import decoded_record
from forgemq_bus.log import Emit, Log, Place, Reader, Record, Writer
from forgemq_contracts import topics
from forgemq_contracts.weights import LoadedWeights, ReportedEngine

FIRST_EPOCH = 1
"""0 is left for "no epoch"."""
_TAIL_RECORDS = 200
"""Enough to contain the newest epoch; trimming keeps more of them (`Topic.newest_kept`)."""


class WonEpoch(NamedTuple):
    """A claimed epoch, and the position in the lane's reports from which a successor shows."""

    epoch: int
    position: int


class Tail(NamedTuple):
    """The newest records of a partition, oldest first, and the position after them."""

    records: list[Record]
    position: int


async def claim_epoch(
    log: Log, writer: Writer, *, lane: int, report: Callable[[int], Emit]
) -> WonEpoch:
    """Claim the lane under a new epoch; of two processes that claim it at once, the later wins.

    Args:
        log: Of the run.
        writer: For the reports.
        lane: Partition of the lane topics.
        report: The first report under an epoch; it must not say that the lane serves.
    """
    reports = Place(topics.REPORTED_ENGINES.name, lane)
    loads = Place(topics.LOADED_WEIGHTS.name, lane)
    end = (await log.end_positions([reports]))[reports]
    known = (await read_tail(log, reports)).records + (await read_tail(log, loads)).records
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
            # A rival reported the same or a newer epoch first: under that epoch our reports could
            # not be distinguished from the rival's. Claim the next one.
            newest = max(*rivals, newest + 1)
    finally:
        await reader.close()


async def read_tail(log: Log, place: Place) -> Tail:
    """Read the newest records of a partition, at most 200."""
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
    """The epoch in a record; the one before the first if the record does not decode."""
    try:
        decoded = decoded_record(record)
    except msgspec.ValidationError:
        return FIRST_EPOCH - 1
    assert isinstance(decoded, ReportedEngine | LoadedWeights)
    return decoded.epoch
