"""Order, positions and topics of every implementation of `bus.log.Log`."""

import asyncio
import time

import pytest

from forgemq_bus.errors import (
    OutOfRangeError,
    PartitionCountError,
    UnknownPlaceError,
)
from forgemq_bus.log import Emit, Log, Place
from tests.conformance.records import (
    A0,
    A1,
    B0,
    B1,
    emit,
    numbered,
    read_records,
    read_values,
    write,
)


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

    async def test_a_reader_that_gathers_misses_nothing_of_what_keeps_coming(
        self, log: Log
    ) -> None:
        reader, writer = await log.reader({A0: 0, B1: 0}, gathers=True), await log.writer()
        for number in range(40):
            await writer.write(emit(A0 if number % 2 else B1, b"%d" % number))
        records = await read_records(reader, 40)
        for place, first in ((B1, 0), (A0, 1)):
            mine = [record.value for record in records if record.place == place]
            assert mine == [b"%d" % number for number in range(first, 40, 2)]

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

    async def test_a_position_below_the_first_record_is_an_error_that_names_the_partition(
        self, log: Log
    ) -> None:
        await write(log, numbered(A1, 5))
        await log.trim({A1: 3})
        reader = await log.reader({A1: 1})
        with pytest.raises(OutOfRangeError, match=r"a/1: position 1 is outside 3\.\.5"):
            await reader.read(timeout_s=5.0, records_max=1)

    async def test_a_position_above_the_end_is_an_error_that_names_the_partition(
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

    async def test_a_reader_that_trimming_overtakes_goes_on_where_it_seeks(self, log: Log) -> None:
        reader = await log.reader({A0: 0, A1: 0})
        await write(log, [*numbered(A0, 6), *numbered(A1, 2)])
        assert len(await read_records(reader, 8)) == 8
        await log.trim({A0: 4})
        reader.seek(A0, 1)
        with pytest.raises(OutOfRangeError, match=r"a/0: position 1 is outside 4\.\.6"):
            await reader.read(timeout_s=5.0, records_max=1)
        assert (reader.position(A0), reader.position(A1)) == (1, 2)
        reader.seek(A0, 4)
        assert await read_values(reader, 2) == [b"4", b"5"]

    async def test_writers_go_on_when_all_they_wrote_is_trimmed(self, log: Log) -> None:
        writer, transactions = await log.writer(), await log.transaction_writer("t")
        ends = await log.end_positions([A0, B0])
        for number in range(3):
            await writer.write(emit(A0, b"%d" % number))
            await transactions.commit(outputs=[emit(B0, b"%d" % number)], group="g", positions={})
            # The end of committed records moves behind a transaction soon after its commit.
            assert await read_values(await log.reader(ends), 2) == [b"%d" % number] * 2
            ends = await log.end_positions([A0, B0])
            await log.trim(ends)
            assert await log.first_positions([A0, B0]) == ends
        await writer.write(emit(A0, b"last"))
        await transactions.commit(outputs=[emit(B0, b"last")], group="g", positions={A0: 3})
        reader = await log.reader(ends)
        assert sorted(await read_values(reader, 2)) == [b"last", b"last"]
        assert await log.committed(group="g", places=[A0]) == {A0: 3}

    async def test_trim_above_the_end_is_refused(self, log: Log) -> None:
        with pytest.raises(OutOfRangeError):
            await log.trim({A0: 1})


class TestTopics:
    async def test_creating_again_is_fine_and_another_count_is_refused(self, log: Log) -> None:
        await log.create_topics({"a": 2, "d": 3})
        with pytest.raises(PartitionCountError, match="has 2 partitions, and its run counts on 4"):
            await log.create_topics({"e": 1, "a": 4})
        with pytest.raises(UnknownPlaceError):
            await write(log, [emit(Place("e", 0), b"")])

    async def test_of_calls_at_the_same_time_one_makes_a_topic(self, log: Log) -> None:
        calls = (log.create_topics({"a": 2, "new": 1}) for _ in range(3))
        made = await asyncio.gather(*calls)
        assert sorted(made, key=len) == [frozenset(), frozenset(), frozenset({"new"})]

    async def test_a_topic_that_may_grow_gets_what_it_lacks_and_keeps_what_it_has(
        self, log: Log
    ) -> None:
        await write(log, [emit(A1, b"before")])
        await log.create_topics({"a": 4, "b": 2}, may_grow=["a", "b"])
        await write(log, [emit(A1, b"behind"), emit(Place("a", 3), b"new")])
        reader = await log.reader({A1: 0, Place("a", 3): 0})
        assert sorted(await read_values(reader, 3)) == [b"before", b"behind", b"new"]
        for wanted in ({"a": 3}, {"b": 1}):
            with pytest.raises(PartitionCountError, match="its run counts on"):
                await log.create_topics(wanted, may_grow=["a", "b"])

    @pytest.mark.parametrize("place", [Place("nowhere", 0), Place("a", 2)])
    async def test_a_partition_that_does_not_exist_is_refused_everywhere(
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
