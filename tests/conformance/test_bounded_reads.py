"""Reading up to the present ends, for every implementation of `bus.log.Log`."""

from forgemq_bus.bounded_reads import read_to_end
from forgemq_bus.log import Log
from tests.conformance.records import A0, A1, B0, numbered, settled_end, write


async def test_reading_to_the_end_passes_commit_markers(log: Log) -> None:
    """The end is behind a commit marker, which a read never returns."""
    await write(log, [*numbered(A0, 600), *numbered(A1, 1)])
    writer = await log.transaction_writer("t")
    await writer.commit(outputs=numbered(B0, 2), group="g", positions={})
    await writer.commit(outputs=numbered(B0, 1, start=2), group="g", positions={})
    await settled_end(log, B0, at_least=5)
    batches = [batch async for batch in read_to_end(log, {A0: 1, A1: 1, B0: 0}, stalled_s=20)]
    found = [record for batch in batches for record in batch]
    assert [r.value for r in found if r.place == A0] == [b"%d" % n for n in range(1, 600)]
    assert [r.value for r in found if r.place == A1] == []
    assert [r.value for r in found if r.place == B0] == [b"0", b"1", b"2"]
