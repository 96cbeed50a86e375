"""Reads up to given ends, with a bound on how long nothing may come."""

import time
from collections.abc import AsyncIterator, Mapping

from forgemq_bus.errors import LogUnavailableError
from forgemq_bus.log import Log, Place, Reader, Record

STALLED_S = 60.0
"""A broker that is being restarted answers within this time; one that lost data never does."""

_READ_S = 0.5
"""One wait for records; `stalled_s` bounds all of them together."""

_RECORDS_MAX = 500
"""Records of one batch: at 1 KB each half a megabyte."""


async def read_to_end(
    log: Log, starts: Mapping[Place, int], *, stalled_s: float = STALLED_S
) -> AsyncIterator[list[Record]]:
    """Yield every committed record from these positions up to the present ends, in batches.

    Raises:
        LogUnavailableError: as `read_up_to`.
    """
    ends = await log.end_positions(list(starts))
    reader = await log.reader(starts)
    try:
        async for records in read_up_to(reader, ends, stalled_s=stalled_s):
            yield records
    finally:
        await reader.close()


async def read_up_to(
    reader: Reader, ends: Mapping[Place, int], *, stalled_s: float = STALLED_S
) -> AsyncIterator[list[Record]]:
    """Yield a reader's batches until its positions have reached every end.

    The last batches may hold records behind an end.

    Args:
        reader: Reads all partitions of `ends`; none of them is paused.
        ends: Positions to reach.
        stalled_s: Longest time in which no position moves while an end is not reached.

    Raises:
        LogUnavailableError: nothing came for `stalled_s`; names the partition with most to read.
    """
    previous: dict[Place, int] = {}
    moved_s = time.monotonic()
    while behind := {p: reader.position(p) for p, end in ends.items() if reader.position(p) < end}:
        if behind != previous:
            previous, moved_s = behind, time.monotonic()
        elif time.monotonic() - moved_s >= stalled_s:
            place = max(behind, key=lambda place: ends[place] - behind[place])
            raise LogUnavailableError(
                f"{place}: nothing came for {stalled_s:g} s at position "
                f"{behind[place]}, the end is {ends[place]}"
            )
        records = await reader.read(timeout_s=min(_READ_S, stalled_s), records_max=_RECORDS_MAX)
        if records:
            yield records
