"""Journalled inputs are read again however slowly they come, as long as they come."""

from itertools import count

from forgemq_bus.log import Emit
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.journal import JournalInput, JournalledBatch
from forgemq_shell.journal import JournalledInputs

TOPIC = topics.SCORED_GROUPS.name
RECORDS = 700  # of one batch: more than three reads


async def test_a_long_range_is_read_whole_although_its_reads_take_longer_than_a_stall() -> None:
    """Half a minute passes between two looks at the clock."""
    log = MemoryLog(run="r", clock_ms=lambda: 0).open()
    await log.create_topics({TOPIC: 1})
    emit = Emit(topic=TOPIC, partition=0, key=b"", value=b"")
    await (await log.writer()).write_all([emit] * RECORDS)
    item = JournalInput(topic=TOPIC, partition=0, offset=0, count=RECORDS)
    batch = JournalledBatch(sequence=0, inputs=(item,), outputs=0, outputs_digest="")
    looks_s = count(0.0, 30.0)
    inputs = JournalledInputs(log, clock_s=lambda: next(looks_s))
    await inputs.open([batch])
    records = await inputs.read(item)
    await log.close()
    assert [record.offset for record in records] == list(range(RECORDS))
