"""Transactions of every implementation of `bus.log.Log`."""

import time

import pytest

from forgemq_bus.errors import (
    FencedError,
)
from forgemq_bus.log import Log
from tests.conformance.clusters import Cluster
from tests.conformance.records import (
    A0,
    A1,
    B0,
    B1,
    C0,
    PATIENCE_S,
    emit,
    numbered,
    read_values,
    settled_end,
    write,
)


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
        assert await reader.read(timeout_s=cluster.quiet_s, records_max=10) == []
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


async def ignore(numbers: frozenset[int]) -> None:
    """The callback of a member whose assignment does not matter."""
