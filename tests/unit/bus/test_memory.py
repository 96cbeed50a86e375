"""Features of the log in memory alone: its clock, its other runs, its invariants."""

from hypothesis import given
from hypothesis import strategies as st

from forgemq_bus.log import Emit, Place
from forgemq_bus.memory import MemoryLog
from forgemq_bus.memory_groups import assigned_range
from forgemq_contracts import topics


def emit(value: bytes, *, topic: str = "a", partition: int = 0) -> Emit:
    return Emit(topic=topic, partition=partition, key=b"", value=value)


async def test_without_a_clock_the_nth_record_of_all_is_written_at_n_ms() -> None:
    log = MemoryLog(run="r")
    await log.create_topics({"a": 2})
    writer = await log.writer()
    await writer.write_all([emit(b"x", partition=number % 2) for number in range(4)])
    reader = await log.reader({Place("a", 0): 0, Place("a", 1): 0})
    records = await reader.read(timeout_s=0, records_max=9)
    assert sorted(record.timestamp_ms for record in records) == [1, 2, 3, 4]


async def test_a_clock_stamps_the_records() -> None:
    now_ms = [1_000]
    log = MemoryLog(run="r", clock_ms=lambda: now_ms[0])
    await log.create_topics({"a": 1})
    writer = await log.writer()
    await writer.write(emit(b"early"))
    now_ms[0] = 2_000
    await writer.write(emit(b"late"))
    reader = await log.reader({Place("a", 0): 0})
    records = await reader.read(timeout_s=0, records_max=9)
    assert [record.timestamp_ms for record in records] == [1_000, 2_000]


async def test_runs_share_only_the_shared_topics() -> None:
    first = MemoryLog(run="first")
    second = first.open(run="second")
    shared = topics.STARTED_RUNS.name
    await first.create_topics({"a": 1, shared: 1})
    await second.create_topics({"a": 1, shared: 1})
    await (await first.writer()).write_all([emit(b"own"), emit(b"for all", topic=shared)])
    assert await second.end_positions([Place("a", 0)]) == {Place("a", 0): 0}
    reader = await second.reader({Place(shared, 0): 0})
    (record,) = await reader.read(timeout_s=0, records_max=9)
    assert (record.topic, record.value) == (shared, b"for all")


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["write", "commit", "abort", "abandon", "trim"]), st.integers(1, 3)),
    max_size=30,
)


@given(ACTIONS)
async def test_committed_readers_see_exactly_what_was_written_or_committed_in_order(
    actions: list[tuple[str, int]],
) -> None:
    log, place = MemoryLog(run="r"), Place("a", 0)
    await log.create_topics({"a": 1})
    reader, writer = await log.reader({place: 0}), await log.writer()
    expected: list[bytes] = []
    seen: list[bytes] = []
    for number, (action, count) in enumerate(actions):
        outputs = [emit(b"%d.%d" % (number, index)) for index in range(count)]
        transactions = await log.transaction_writer("t")
        if action == "write":
            await writer.write_all(outputs)
        elif action == "commit":
            await transactions.commit(outputs=outputs, group="g", positions={place: number})
        elif action == "abort":
            await transactions.abort(outputs=outputs)
        elif action == "abandon":
            await transactions.abandon(outputs=outputs)
        else:
            await log.trim({place: reader.position(place)})
        if action in ("write", "commit"):
            expected += [output.value for output in outputs]
        seen += [record.value for record in await reader.read(timeout_s=0, records_max=count)]
    await log.transaction_writer("t")
    seen += [record.value for record in await reader.read(timeout_s=0, records_max=1000)]
    assert seen == expected
    assert reader.position(place) == (await log.end_positions([place]))[place]


@given(st.integers(1, 50), st.integers(1, 20))
def test_the_range_assignment_gives_every_partition_to_exactly_one_member(
    partitions: int, members: int
) -> None:
    shares = [assigned_range(partitions, index=index, members=members) for index in range(members)]
    assert sorted(number for share in shares for number in share) == list(range(partitions))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
