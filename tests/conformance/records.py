"""The records that the suite writes and reads."""

import asyncio
import time

from forgemq_bus.log import Emit, Log, Place, Reader, Record

A0, A1 = Place("a", 0), Place("a", 1)
B0, B1 = Place("b", 0), Place("b", 1)
C0 = Place("c", 0)
PATIENCE_S = 15.0


def emit(place: Place, value: bytes, *, key: bytes = b"k") -> Emit:
    return Emit(topic=place.topic, partition=place.partition, key=key, value=value)


def numbered(place: Place, count: int, *, start: int = 0) -> list[Emit]:
    return [emit(place, b"%d" % number) for number in range(start, start + count)]


async def read_values(reader: Reader, count: int) -> list[bytes]:
    return [record.value for record in await read_records(reader, count)]


async def read_records(reader: Reader, count: int) -> list[Record]:
    """Read `count` records; fewer if none comes for `PATIENCE_S`."""
    found: list[Record] = []
    deadline_s = time.monotonic() + PATIENCE_S
    while len(found) < count and time.monotonic() < deadline_s:
        found += await reader.read(timeout_s=1.0, records_max=count - len(found))
    return found


async def write(log: Log, emits: list[Emit]) -> list[int]:
    writer = await log.writer()
    try:
        return await writer.write_all(emits)
    finally:
        await writer.close()


async def settled_end(log: Log, place: Place, *, at_least: int) -> int:
    """Wait until the marker of the last commit is written; returns the partition's end."""
    deadline_s = time.monotonic() + PATIENCE_S
    end = 0
    while end < at_least and time.monotonic() < deadline_s:
        end = (await log.end_positions([place]))[place]
        await asyncio.sleep(0.02)
    assert end == at_least
    return end
