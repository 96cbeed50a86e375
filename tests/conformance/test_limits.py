"""Back-pressure, large values and closing of every implementation of `bus.log.Log`."""

import pytest

from forgemq_bus.errors import (
    BlobError,
    ClosedError,
    RecordTooLargeError,
)
from forgemq_bus.log import Emit, Log
from forgemq_bus.payloads import reference_of
from tests.conformance.clusters import Cluster
from tests.conformance.records import (
    A0,
    A1,
    B0,
    emit,
    numbered,
    read_records,
    read_values,
    write,
)


class TestBackPressure:
    async def test_paused_partitions_give_nothing_and_lose_nothing(
        self, log: Log, cluster: Cluster
    ) -> None:
        await write(log, [*numbered(A0, 5), *numbered(A1, 5)])
        reader = await log.reader({A0: 0, A1: 0})
        assert len(await read_records(reader, 1)) == 1
        reader.pause([A0, A1])
        before = reader.position(A0), reader.position(A1)
        assert await reader.read(timeout_s=cluster.quiet_s, records_max=100) == []
        reader.resume([A1])
        await write(log, [*numbered(A0, 2, start=5), *numbered(A1, 2, start=5)])
        got = await read_records(reader, 7 - before[1])
        assert {record.place for record in got} == {A1}
        assert got[-1].offset == 6
        assert reader.position(A0) == before[0]
        reader.resume([A0])
        rest = await read_records(reader, 7 - before[0])
        assert [record.offset for record in rest] == list(range(before[0], 7))

    async def test_never_more_records_than_asked_for(self, log: Log) -> None:
        await write(log, [*numbered(A0, 50), *numbered(A1, 50)])
        reader = await log.reader({A0: 0, A1: 0})
        total = 0
        while total < 100:
            batch = await reader.read(timeout_s=5.0, records_max=7)
            assert 0 < len(batch) <= 7
            total += len(batch)

    async def test_a_slow_reader_loses_nothing_of_a_fast_writer(self, log: Log) -> None:
        reader, writer = await log.reader({A0: 0}), await log.writer()
        payload = bytes(1_500)
        for _ in range(4):
            await writer.write_all([emit(A0, payload) for _ in range(250)])
            await reader.read(timeout_s=1.0, records_max=3)
        offsets = [record.offset for record in await read_records(reader, 1_000 - 12)]
        assert offsets == list(range(12, 1_000))


class TestLargeValues:
    async def test_a_value_above_the_limit_comes_back_whole_through_the_blob_store(
        self, log: Log, cluster: Cluster
    ) -> None:
        large, header = bytes(range(256)) * 40, ("traceparent", b"t")
        item = Emit(topic="a", partition=0, key=b"k", value=large, headers=(header,))
        await write(log, [emit(A0, b"small"), item])
        records = await read_records(await log.reader({A0: 0}), 2)
        assert [record.value for record in records] == [b"small", large]
        assert records[1].headers == (header,)
        blind = await cluster.process(has_blobs=False).reader({A0: 1})
        with pytest.raises(BlobError, match="a/0@1"):
            await blind.read(timeout_s=5.0, records_max=1)
        assert blind.position(A0) == 1

    async def test_a_reader_without_values_says_where_they_lie_and_needs_no_blob_store(
        self, log: Log, cluster: Cluster
    ) -> None:
        await write(log, [emit(A0, b"small"), emit(A0, b"large" * 1_000)])
        blind = await cluster.process(has_blobs=False).reader({A0: 0}, has_values=False)
        small, large = await read_records(blind, 2)
        assert (small.value, reference_of(small)) == (b"small", None)
        assert (large.value, large.offset) == (b"", 1)
        reference = reference_of(large)
        assert reference is not None
        assert reference.uri.endswith(reference.sha256)

    async def test_a_read_is_bounded_in_bytes_also_of_values_in_the_blob_store(
        self, log: Log
    ) -> None:
        values = [bytes([number]) * 4_000 for number in range(6)]
        await write(log, [emit(A0, value) for value in values])
        reader = await log.reader({A0: 0})
        sizes = []
        while sum(sizes) < 6:
            records = await reader.read(timeout_s=5.0, records_max=100, bytes_max=9_000)
            assert [r.value for r in records] == values[sum(sizes) :][: len(records)]
            assert reader.position(A0) == sum(sizes) + len(records)
            sizes.append(len(records))
        assert max(sizes) == 2

    async def test_large_outputs_of_a_transaction_are_blobs_too(self, log: Log) -> None:
        writer = await log.transaction_writer("t")
        values = [b"%d" % number * 5_000 for number in range(4)]
        outputs = [emit(B0, value) for value in values]
        await writer.commit(outputs=outputs, group="g", positions={})
        assert await read_values(await log.reader({B0: 0}), 4) == values

    async def test_a_value_that_fits_nowhere_is_refused_before_anything_is_written(
        self, log: Log, cluster: Cluster
    ) -> None:
        blind = cluster.process(has_blobs=False)
        outputs = [emit(B0, b"small"), emit(B0, bytes(9 * 1024 * 1024))]
        writer = await blind.transaction_writer("t")
        with pytest.raises(RecordTooLargeError, match="b/0"):
            await writer.commit(outputs=outputs, group="g", positions={})
        with pytest.raises(RecordTooLargeError, match="b/0"):
            await write(blind, outputs)
        assert await log.end_positions([B0]) == {B0: 0}
        await writer.commit(outputs=outputs[:1], group="g", positions={})


class TestClosing:
    async def test_closing_twice_is_fine_and_use_after_it_is_an_error(
        self, cluster: Cluster, log: Log
    ) -> None:
        own = cluster.process()
        reader, writer = await own.reader({A0: 0}), await own.writer()
        transactions = await own.transaction_writer("t")
        for _ in range(2):
            await reader.close()
            await own.close()
        with pytest.raises(ClosedError):
            await reader.read(timeout_s=0.0, records_max=1)
        with pytest.raises(ClosedError):
            await writer.write(emit(A0, b""))
        with pytest.raises(ClosedError):
            await transactions.commit(outputs=[], group="g", positions={A0: 1})
        with pytest.raises(ClosedError):
            await own.writer()
        assert await log.end_positions([A0]) == {A0: 0}
