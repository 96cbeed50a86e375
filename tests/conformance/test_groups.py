"""Consumer groups of every implementation of `bus.log.Log`."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from forgemq_bus.log import Emit, Log, Member, Place, Record
from tests.conformance.clusters import Cluster

PATIENCE_S = 30.0


def emits(topic: str, count: int) -> list[Emit]:
    return [
        Emit(topic=topic, partition=number % 2, key=b"", value=b"%d" % number)
        for number in range(count)
    ]


@dataclass
class Watched:
    """A member and the callbacks it got, in order."""

    callbacks: list[tuple[str, frozenset[int]]] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    owned_when_read: list[frozenset[int]] = field(default_factory=list)
    assigning_s: float = 0.0
    is_assigning: bool = False
    read_while_assigning: int = 0
    member: Member | None = None
    has_records: bool = True

    async def assigned(self, numbers: frozenset[int]) -> None:
        self.is_assigning = True
        await asyncio.sleep(self.assigning_s)
        self.callbacks.append(("assigned", numbers))
        self.is_assigning = False

    async def revoked(self, numbers: frozenset[int]) -> None:
        self.callbacks.append(("revoked", numbers))

    async def join(self, log: Log, *, topics: tuple[str, ...] = ("a", "b")) -> Member:
        self.member = await log.member(
            group="g",
            topics=topics,
            on_assigned=self.assigned,
            on_revoked=self.revoked,
            has_records=self.has_records,
        )
        return self.member

    async def keep_reading(self) -> None:
        assert self.member is not None
        while True:
            records = await self.member.read(timeout_s=0.2, records_max=20)
            if records:
                self.read_while_assigning += self.is_assigning
                self.owned_when_read.append(self.member.assigned())
                self.records += records


@asynccontextmanager
async def reading(*watched: Watched) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one.keep_reading()) for one in watched]
        yield
        for task in tasks:
            task.cancel()


async def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        await asyncio.sleep(0.02)


async def test_a_lone_member_owns_and_reads_everything_from_the_first_record(log: Log) -> None:
    await (await log.writer()).write_all([*emits("a", 6), *emits("b", 4)])
    await log.trim({Place("a", 0): 1})
    watched = Watched()
    member = await watched.join(log)
    assert member.assigned() == frozenset({0, 1})
    assert watched.callbacks == [("assigned", frozenset({0, 1}))]
    async with reading(watched):
        await until(lambda: len(watched.records) == 9)
    places = {(record.place, record.offset) for record in watched.records}
    assert (Place("a", 0), 0) not in places
    assert len(places) == 9


async def test_a_member_starts_at_the_committed_positions_of_its_group(log: Log) -> None:
    await (await log.writer()).write_all(emits("a", 10))
    writer = await log.transaction_writer("t")
    await writer.commit(outputs=[], group="g", positions={Place("a", 0): 5, Place("a", 1): 3})
    watched = Watched()
    await watched.join(log, topics=("a",))
    async with reading(watched):
        await until(lambda: len(watched.records) == 2)
    assert [(record.partition, record.offset) for record in watched.records] == [(1, 3), (1, 4)]


async def test_two_members_share_the_partitions_and_equal_numbers_stay_together(
    log: Log, cluster: Cluster
) -> None:
    first, second = Watched(), Watched()
    await first.join(log)
    async with reading(first):
        member = await second.join(cluster.process())
        await until(lambda: first.member is not None and len(first.member.assigned()) == 1)
        async with reading(second):
            assert first.member is not None
            assert {*first.member.assigned(), *member.assigned()} == {0, 1}
            await (await log.writer()).write_all([*emits("a", 20), *emits("b", 20)])
            await until(lambda: len(first.records) + len(second.records) == 40)
    for watched in (first, second):
        assert watched.member is not None
        places = {record.place for record in watched.records}
        (number,) = watched.member.assigned()
        assert places == {Place("a", number), Place("b", number)}


async def test_partitions_of_a_member_that_leaves_go_to_the_others(
    log: Log, cluster: Cluster
) -> None:
    first, second = Watched(), Watched()
    await first.join(log, topics=("a",))
    async with reading(first):
        leaving = await second.join(cluster.process(), topics=("a",))
        await leaving.close()
        assert second.callbacks[-1][0] == "revoked"
        assert first.member is not None
        await until(lambda: first.member is not None and len(first.member.assigned()) == 2)
        await (await log.writer()).write_all(emits("a", 4))
        await until(lambda: len(first.records) == 4)
    assigned = [numbers for event, numbers in first.callbacks if event == "assigned"]
    assert assigned[0] == assigned[-1] == frozenset({0, 1})


async def test_every_assignment_is_revoked_before_the_next_one(log: Log, cluster: Cluster) -> None:
    first, second = Watched(), Watched()
    await first.join(log, topics=("a",))
    async with reading(first):
        other = await second.join(cluster.process(), topics=("a",))
        await until(lambda: first.member is not None and len(first.member.assigned()) == 1)
        await other.close()
        await until(lambda: first.member is not None and len(first.member.assigned()) == 2)
    assert first.member is not None
    await first.member.close()
    for callbacks in (first.callbacks, second.callbacks):
        assert [event for event, _ in callbacks] == ["assigned", "revoked"] * (len(callbacks) // 2)
        for (_, given), (_, taken) in zip(callbacks[::2], callbacks[1::2], strict=True):
            assert given == taken


async def test_no_record_is_returned_before_the_callback_has_returned(
    log: Log, cluster: Cluster
) -> None:
    await (await log.writer()).write_all(emits("a", 40))
    first, second = (Watched(assigning_s=cluster.quiet_s) for _ in range(2))
    await first.join(log, topics=("a",))
    async with reading(first):
        await second.join(cluster.process(), topics=("a",))
        async with reading(second):
            await until(lambda: bool(first.records and second.records))
    assert first.read_while_assigning == second.read_while_assigning == 0


async def test_a_paused_partition_stays_paused_and_others_are_read(
    log: Log, cluster: Cluster
) -> None:
    await (await log.writer()).write_all(emits("a", 10))
    watched = Watched()
    member = await watched.join(log, topics=("a",))
    member.pause([Place("a", 0)])
    async with reading(watched):
        await until(lambda: len(watched.records) == 5)
        await asyncio.sleep(cluster.quiet_s)
        assert {record.partition for record in watched.records} == {1}
        member.resume([Place("a", 0)])
        await until(lambda: len(watched.records) == 10)


async def test_a_member_without_records_only_owns_its_partitions(
    log: Log, cluster: Cluster
) -> None:
    await (await log.writer()).write_all(emits("a", 10))
    first, second = (Watched(has_records=False) for _ in range(2))
    member = await first.join(log, topics=("a",))
    assert member.assigned() == frozenset({0, 1})
    began_s = time.monotonic()
    assert await member.read(timeout_s=cluster.quiet_s, records_max=20) == []
    assert time.monotonic() - began_s >= 0.9 * cluster.quiet_s
    async with reading(first):
        leaving = await second.join(cluster.process(), topics=("a",))
        await until(lambda: len(member.assigned()) == 1)
        assert {*member.assigned(), *leaving.assigned()} == {0, 1}
        await leaving.close()
        await until(lambda: len(member.assigned()) == 2)
    assert first.records == []
    everything = frozenset({0, 1})
    assert first.callbacks[:2] == [("assigned", everything), ("revoked", everything)]
    assert first.callbacks[-1] == ("assigned", everything)


async def test_topics_with_different_counts_cannot_be_joined_together(log: Log) -> None:
    with pytest.raises(ValueError, match="not co-partitioned"):
        await Watched().join(log, topics=("a", "c"))


async def test_an_error_of_the_first_callback_reaches_the_caller_who_is_then_not_a_member(
    log: Log,
) -> None:
    async def fail(numbers: frozenset[int]) -> None:
        raise RuntimeError("cannot take over")

    with pytest.raises(RuntimeError, match="cannot take over"):
        await log.member(group="g", topics=["a"], on_assigned=fail, on_revoked=fail)
    watched = Watched()
    member = await watched.join(log, topics=("a",))
    assert member.assigned() == frozenset({0, 1})


async def test_an_instance_gets_its_partitions_back_and_no_other_member_notices(
    log: Log, cluster: Cluster
) -> None:
    first, second, again = Watched(), Watched(), Watched()
    await first.join(cluster.process(instance="one"), topics=("a",))
    async with reading(first):
        leaving = await second.join(cluster.process(instance="two"), topics=("a",))
        await until(lambda: first.member is not None and len(first.member.assigned()) == 1)
        before, owned = list(first.callbacks), leaving.assigned()
        began_s = time.monotonic()
        await leaving.close()
        returned = await again.join(cluster.process(instance="two"), topics=("a",))
        assert returned.assigned() == owned
        assert time.monotonic() - began_s < PATIENCE_S
        assert first.callbacks == before
        await (await log.writer()).write_all(emits("a", 4))
        async with reading(again):
            await until(lambda: len(first.records) + len(again.records) == 4)


@pytest.mark.slow
@pytest.mark.usefixtures("log")
async def test_the_partitions_of_an_instance_that_stays_away_go_to_the_others(
    cluster: Cluster,
) -> None:
    first, second = Watched(), Watched()
    await first.join(cluster.process(instance="one"), topics=("a",))
    async with reading(first):
        leaving = await second.join(cluster.process(instance="two"), topics=("a",))
        await until(lambda: first.member is not None and len(first.member.assigned()) == 1)
        await leaving.close()
        await until(lambda: first.member is not None and len(first.member.assigned()) == 2)
