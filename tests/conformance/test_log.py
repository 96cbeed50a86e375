"""One suite for every implementation of `bus.log.Log`; each test is a promise to its users."""

import asyncio
import time

import pytest

from forgemq.bus.errors import (
    BlobError,
    ClosedError,
    FencedError,
    OutOfRangeError,
    RecordTooLargeError,
    UnknownPlaceError,
)
from forgemq.bus.log import Emit, Log, Place, Reader, Record
from tests.conformance.clusters import Cluster

A0, A1 = Place("a", 0), Place("a", 1)
B0, B1 = Place("b", 0), Place("b", 1)
C0 = Place("c", 0)
QUIET_S = 0.6  # Long enough for a record that must not come to have come.
PATIENCE_S = 15.0


def emit(place: Place, value: bytes, *, key: bytes = b"k") -> Emit:
    return Emit(topic=place.topic, partition=place.partition, key=key, value=value)


def numbered(place: Place, count: int, *, start: int = 0) -> list[Emit]:
    return [emit(place, b"%d" % number) for number in range(start, start + count)]


async def read_values(reader: Reader, count: int) -> list[bytes]:
    return [record.value for record in await read_records(reader, count)]


async def read_records(reader: Reader, count: int) -> list[Record]:
    """Exactly so many records, or fewer where no more come for `PATIENCE_S`."""
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


class TestOrder:
    async def test_records_of_a_partition_come_in_the_order_they_were_written(
        self, log: Log
    ) -> None:
        emits = [
            emit(Place("a", number % 2), b"%d" % number, key=b"%d" % (number % 7))
            for number in range(500)
        ]
        await write(log, emits)
        reader = await log.reader({A0: 0, A1: 0})
        records = await read_records(reader, 500)
        for partition in (0, 1):
            mine = [record for record in records if record.partition == partition]
            assert [record.value for record in mine] == [
                b"%d" % number for number in range(partition, 500, 2)
            ]
            assert [record.offset for record in mine] == list(range(250))

    async def test_a_write_returns_the_offset_at_which_the_record_is_read(self, log: Log) -> None:
        offsets = await write(log, [*numbered(A0, 3), *numbered(A1, 1), *numbered(A0, 1)])
        assert offsets == [0, 1, 2, 0, 3]

    async def test_key_headers_and_an_empty_value_come_back_unchanged(self, log: Log) -> None:
        headers = (("traceparent", b"00-1-2-01"), ("traceparent", b"twice"), ("x", b""))
        sent = Emit(topic="a", partition=1, key=b"\x00key", value=b"", headers=headers)
        await write(log, [sent])
        reader = await log.reader({A1: 0})
        (record,) = await read_records(reader, 1)
        assert (record.place, record.offset) == (A1, 0)
        assert (record.key, record.value, record.headers) == (b"\x00key", b"", headers)

    async def test_concurrent_writes_of_one_writer_all_arrive_once(self, log: Log) -> None:
        writer = await log.writer()
        offsets = await asyncio.gather(*(writer.write(item) for item in numbered(A0, 200)))
        assert sorted(offsets) == list(range(200))
        reader = await log.reader({A0: 0})
        by_offset = {record.offset: record.value for record in await read_records(reader, 200)}
        assert by_offset == {offset: b"%d" % number for number, offset in enumerate(offsets)}

    async def test_a_waiting_read_wakes_when_a_record_arrives(self, log: Log) -> None:
        reader, writer = await log.reader({A0: 0, B1: 0}), await log.writer()
        await writer.write(emit(B1, b"warm"))
        await read_records(reader, 1)
        reading = asyncio.ensure_future(reader.read(timeout_s=10.0, records_max=10))
        await asyncio.sleep(0.1)
        began_s = time.monotonic()
        await writer.write(emit(A0, b"now"))
        (record,) = await reading
        assert record.value == b"now"
        assert time.monotonic() - began_s < 0.2

    async def test_a_read_without_records_returns_nothing_after_its_time(self, log: Log) -> None:
        reader = await log.reader({A0: 0})
        began_s = time.monotonic()
        assert await reader.read(timeout_s=0.3, records_max=10) == []
        assert 0.25 < time.monotonic() - began_s < 2.0

    async def test_no_partition_starves_beside_a_full_one(self, log: Log) -> None:
        await write(log, [*numbered(A0, 300), *numbered(A1, 1)])
        reader = await log.reader({A0: 0, A1: 0})
        first = [await reader.read(timeout_s=5.0, records_max=10) for _ in range(2)]
        assert A1 in {record.place for batch in first for record in batch}


class TestPositions:
    async def test_a_position_is_the_offset_of_the_next_record_to_be_read(self, log: Log) -> None:
        await write(log, numbered(A0, 10))
        reader = await log.reader({A0: 4, A1: 0})
        assert reader.position(A0) == 4
        assert await read_values(reader, 3) == [b"4", b"5", b"6"]
        assert (reader.position(A0), reader.position(A1)) == (7, 0)

    async def test_seek_goes_back_and_forth_and_drops_what_was_read_ahead(self, log: Log) -> None:
        await write(log, numbered(A0, 10))
        reader = await log.reader({A0: 0})
        assert await read_values(reader, 2) == [b"0", b"1"]
        reader.seek(A0, 8)
        assert reader.position(A0) == 8
        assert await read_values(reader, 2) == [b"8", b"9"]
        reader.seek(A0, 1)
        assert await read_values(reader, 1) == [b"1"]

    async def test_a_position_below_the_first_record_is_an_error_that_names_the_place(
        self, log: Log
    ) -> None:
        await write(log, numbered(A1, 5))
        await log.trim({A1: 3})
        reader = await log.reader({A1: 1})
        with pytest.raises(OutOfRangeError, match=r"a/1: position 1 is outside 3\.\.5"):
            await reader.read(timeout_s=5.0, records_max=1)

    async def test_a_position_above_the_end_is_an_error_that_names_the_place(
        self, log: Log
    ) -> None:
        reader = await log.reader({A0: 7})
        with pytest.raises(OutOfRangeError, match=r"a/0: position 7 is outside 0\.\.0"):
            await reader.read(timeout_s=5.0, records_max=1)

    async def test_a_reader_at_the_end_gets_only_what_comes_later(self, log: Log) -> None:
        await write(log, numbered(A0, 3))
        reader = await log.reader(await log.end_positions([A0]))
        await write(log, [emit(A0, b"later")])
        assert await read_values(reader, 1) == [b"later"]

    async def test_trim_deletes_records_below_and_keeps_the_others(self, log: Log) -> None:
        await write(log, numbered(A0, 6))
        await log.trim({A0: 4})
        assert await log.first_positions([A0, A1]) == {A0: 4, A1: 0}
        assert await log.end_positions([A0]) == {A0: 6}
        assert await read_values(await log.reader({A0: 4}), 2) == [b"4", b"5"]
        await log.trim({A0: 2})
        assert await log.first_positions([A0]) == {A0: 4}

    async def test_trim_of_everything_leaves_first_and_end_equal(self, log: Log) -> None:
        await write(log, numbered(A0, 6))
        await log.trim({A0: 6})
        assert await log.first_positions([A0]) == await log.end_positions([A0]) == {A0: 6}

    async def test_trim_above_the_end_is_refused(self, log: Log) -> None:
        with pytest.raises(OutOfRangeError):
            await log.trim({A0: 1})


class TestTopics:
    async def test_creating_again_is_fine_and_another_count_is_refused(self, log: Log) -> None:
        await log.create_topics({"a": 2, "d": 3})
        with pytest.raises(ValueError, match="has 2 partitions, not 4"):
            await log.create_topics({"e": 1, "a": 4})
        with pytest.raises(UnknownPlaceError):
            await write(log, [emit(Place("e", 0), b"")])

    @pytest.mark.parametrize("place", [Place("nowhere", 0), Place("a", 2)])
    async def test_a_place_that_does_not_exist_is_refused_everywhere(
        self, log: Log, place: Place
    ) -> None:
        transactions = await log.transaction_writer("t")
        with pytest.raises(UnknownPlaceError):
            await write(log, [emit(A0, b"not written either"), emit(place, b"")])
        with pytest.raises(UnknownPlaceError):
            await transactions.commit(outputs=[emit(place, b"")], group="g", positions={})
        with pytest.raises(UnknownPlaceError):
            await transactions.commit(outputs=[], group="g", positions={place: 0})
        with pytest.raises(UnknownPlaceError):
            await log.reader({place: 0})
        with pytest.raises(UnknownPlaceError):
            await log.end_positions([place])
        assert await log.end_positions([A0]) == {A0: 0}
        await transactions.commit(outputs=[emit(A0, b"alive")], group="g", positions={})


class TestTransactions:
    async def test_outputs_and_positions_of_a_commit_appear_together(self, log: Log) -> None:
        writer = await log.transaction_writer("t")
        await writer.commit(
            outputs=[*numbered(B0, 3), *numbered(C0, 1), *numbered(B1, 1)],
            group="g",
            positions={A0: 7, A1: 2},
        )
        assert await log.committed(group="g", places=[A0, A1, B0]) == {A0: 7, A1: 2}
        reader = await log.reader({B0: 0, B1: 0, C0: 0})
        assert sorted(await read_values(reader, 5)) == [b"0", b"0", b"0", b"1", b"2"]

    async def test_positions_are_those_of_the_newest_commit_of_their_group(self, log: Log) -> None:
        writer = await log.transaction_writer("t")
        for position in range(1, 6):
            await writer.commit(outputs=[], group="g", positions={A0: position})
        await writer.commit(outputs=[], group="other", positions={A0: 99})
        assert await log.committed(group="g", places=[A0, A1]) == {A0: 5}
        assert await log.committed(group="nobody", places=[A0]) == {}

    async def test_commits_without_outputs_or_without_positions_work(self, log: Log) -> None:
        writer = await log.transaction_writer("t")
        await writer.commit(outputs=[], group="g", positions={})
        await writer.commit(outputs=[emit(B0, b"x")], group="g", positions={})
        await writer.commit(outputs=[], group="g", positions={A0: 1})
        assert await log.committed(group="g", places=[A0]) == {A0: 1}
        assert await read_values(await log.reader({B0: 0}), 1) == [b"x"]

    async def test_a_reader_that_has_read_everything_stands_at_the_end(self, log: Log) -> None:
        writer = await log.transaction_writer("t")
        for number in range(3):
            await writer.commit(outputs=numbered(B0, 2, start=2 * number), group="g", positions={})
        end = await settled_end(log, B0, at_least=9)
        reader = await log.reader({B0: 0})
        values: list[bytes] = []
        began_s = time.monotonic()
        while reader.position(B0) < end and time.monotonic() - began_s < PATIENCE_S:
            values += [record.value for record in await reader.read(timeout_s=1.0, records_max=2)]
        assert values == [b"%d" % number for number in range(6)]
        assert reader.position(B0) == end

    async def test_committed_readers_never_see_an_aborted_transaction(
        self, log: Log, cluster: Cluster
    ) -> None:
        await cluster.abort("dead", numbered(A0, 3))
        await write(log, [emit(A0, b"after")])
        assert await read_values(await log.reader({A0: 0}), 1) == [b"after"]
        everything = await log.reader({A0: 0}, isolation="uncommitted")
        assert await read_values(everything, 4) == [b"0", b"1", b"2", b"after"]

    async def test_an_open_transaction_holds_up_committed_readers_until_it_is_fenced(
        self, log: Log, cluster: Cluster
    ) -> None:
        await write(log, [emit(A0, b"before")])
        await cluster.leave_open("stuck", numbered(A0, 2))
        await write(log, [emit(A0, b"behind")])
        reader = await log.reader({A0: 0})
        assert await read_values(reader, 1) == [b"before"]
        assert await reader.read(timeout_s=QUIET_S, records_max=10) == []
        assert await log.end_positions([A0]) == {A0: 1}
        assert await log.end_positions([A0], isolation="uncommitted") == {A0: 4}
        everything = await log.reader({A0: 0}, isolation="uncommitted")
        assert await read_values(everything, 4) == [b"before", b"0", b"1", b"behind"]
        await log.transaction_writer("stuck")
        assert await read_values(reader, 1) == [b"behind"]

    async def test_a_newer_writer_of_the_same_id_fences_the_older_one(
        self, log: Log, cluster: Cluster
    ) -> None:
        older = await log.transaction_writer("t")
        await older.commit(outputs=[emit(B0, b"1")], group="g", positions={A0: 1})
        newer = await cluster.process().transaction_writer("t")
        with pytest.raises(FencedError):
            await older.commit(outputs=[emit(B0, b"no")], group="g", positions={A0: 99})
        with pytest.raises(FencedError):
            await older.commit(outputs=[emit(B0, b"nor")], group="g", positions={})
        await newer.commit(outputs=[emit(B0, b"2")], group="g", positions={A0: 2})
        assert await log.committed(group="g", places=[A0]) == {A0: 2}
        assert await read_values(await log.reader({B0: 0}), 2) == [b"1", b"2"]

    async def test_positions_can_be_committed_for_a_group_with_members(self, log: Log) -> None:
        await write(log, numbered(A0, 4))
        member = await log.member(group="g", topics=["a"], on_assigned=ignore, on_revoked=ignore)
        writer = await log.transaction_writer("t")
        await writer.commit(outputs=[], group="g", positions={A0: 3})
        assert await log.committed(group="g", places=[A0]) == {A0: 3}
        await member.close()

    async def test_large_transactions_over_many_partitions_are_atomic_and_in_order(
        self, log: Log
    ) -> None:
        writer = await log.transaction_writer("t")
        outputs = [emit(place, b"%d" % n) for n in range(400) for place in (A0, A1, B0, B1)]
        await writer.commit(outputs=outputs, group="g", positions={C0: 1})
        for place in (A0, A1, B0, B1):
            values = await read_values(await log.reader({place: 0}), 400)
            assert values == [b"%d" % number for number in range(400)]


class TestRedelivery:
    async def test_after_a_crash_reading_goes_on_from_the_committed_position(
        self, cluster: Cluster, log: Log
    ) -> None:
        await write(log, numbered(A0, 10))
        crashed = cluster.process()
        reader = await crashed.reader({A0: 0})
        writer = await crashed.transaction_writer("t")
        await read_values(reader, 4)
        await writer.commit(outputs=numbered(B0, 4), group="g", positions={A0: 4})
        await read_values(reader, 3)
        await cluster.leave_open("t", numbered(B0, 3, start=4))

        survivor = cluster.process()
        again = await survivor.transaction_writer("t")
        positions = await survivor.committed(group="g", places=[A0])
        assert positions == {A0: 4}
        reader = await survivor.reader(positions)
        values = await read_values(reader, 6)
        assert values == [b"%d" % number for number in range(4, 10)]
        outputs = [emit(B0, value) for value in values]
        await again.commit(outputs=outputs, group="g", positions={A0: 10})
        published = await read_values(await survivor.reader({B0: 0}), 10)
        assert published == [b"%d" % number for number in range(10)]


class TestBackPressure:
    async def test_paused_partitions_give_nothing_and_lose_nothing(self, log: Log) -> None:
        await write(log, [*numbered(A0, 5), *numbered(A1, 5)])
        reader = await log.reader({A0: 0, A1: 0})
        assert len(await read_records(reader, 1)) == 1
        reader.pause([A0, A1])
        before = reader.position(A0), reader.position(A1)
        assert await reader.read(timeout_s=QUIET_S, records_max=100) == []
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


async def ignore(numbers: frozenset[int]) -> None:
    """A callback of a member that needs none."""


async def settled_end(log: Log, place: Place, *, at_least: int) -> int:
    """The end of a partition once the last marker is written, which follows its commit."""
    deadline_s = time.monotonic() + PATIENCE_S
    end = 0
    while end < at_least and time.monotonic() < deadline_s:
        end = (await log.end_positions([place]))[place]
        await asyncio.sleep(0.02)
    assert end == at_least
    return end
