"""Reading up to the present ends: every record, or an error that names the position."""

import pytest

from forgemq_bus.bounded_reads import read_to_end, read_up_to
from forgemq_bus.errors import LogUnavailableError
from forgemq_bus.log import Emit, Place
from forgemq_bus.memory import MemoryLog

A0, A1 = Place("a", 0), Place("a", 1)


async def log_of(*values: bytes) -> MemoryLog:
    """These values on partition 0, one record on partition 1."""
    log = MemoryLog(run="r")
    await log.create_topics({"a": 2})
    writer = await log.writer()
    await writer.write_all(
        [Emit(topic="a", partition=0, key=b"", value=value) for value in values]
        + [Emit(topic="a", partition=1, key=b"", value=b"other")]
    )
    return log


async def test_every_record_up_to_the_present_ends_is_read() -> None:
    log = await log_of(*[str(number).encode() for number in range(1200)])
    found = [r async for batch in read_to_end(log, {A0: 2, A1: 0}) for r in batch]
    assert [r.offset for r in found if r.place == A0] == list(range(2, 1200))
    assert [r.value for r in found if r.place == A1] == [b"other"]


async def test_nothing_to_read_is_no_wait_and_no_batch() -> None:
    log = await log_of(b"x")
    assert [batch async for batch in read_to_end(log, {A0: 1, A1: 1}, stalled_s=0.01)] == []


async def test_a_log_that_stands_still_is_an_error_that_names_the_partition() -> None:
    log = await log_of(b"x", b"y")
    reader = await log.reader({A0: 0, A1: 0})
    reading = read_up_to(reader, {A0: 5, A1: 1}, stalled_s=0.2)
    first = await anext(reading)
    assert [record.value for record in first if record.place == A0] == [b"x", b"y"]
    with pytest.raises(
        LogUnavailableError, match=r"a/0: nothing came for 0\.2 s at position 2, the end is 5"
    ):
        await anext(reading)
