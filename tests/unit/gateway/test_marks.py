"""A gateway commits what a restart needs as long as it lives, and never a position too high."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgemq_bus.log import Emit, Log, Place
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_gateway.marks import NEEDED_GROUP, Marks, take_mark
from forgemq_gateway.oldest_mark import OldestMark
from forgemq_telemetry.telemetry import Telemetry

REQUESTED = Place(topics.REQUESTED_GROUPS.name, 0)
FINISHED = Place(topics.FINISHED_COMPLETIONS.name, 0)
TOPICS = {REQUESTED.topic: 1, FINISHED.topic: 1}
EVERY_S = 0.005


async def nothing_to_keep() -> None:
    """As a gateway that has no more keys than before."""


class MarkingGateway:
    """How far a gateway has read, and its marks; tests write and let it read."""

    def __init__(self, log: Log, *, every_s: float = EVERY_S) -> None:
        self.log = log
        self.lines = io.StringIO()
        self.first_read = {REQUESTED: 0}
        self.open_groups: set[str] = set()
        self.marks = Marks(
            log,
            starts={REQUESTED: 0, FINISHED: 0},
            first_read=self.first_read,
            open_groups=self.open_groups,
            every_s=every_s,
            telemetry=Telemetry(service="gateway", stream=self.lines),
            keep_known=nothing_to_keep,
        )

    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in self.lines.getvalue().splitlines()]

    async def read_requests(self) -> None:
        """Read every requested group."""
        self.first_read |= await self.log.end_positions([REQUESTED])

    @asynccontextmanager
    async def marking(self) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(self.marks.keep())
        try:
            yield task
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def write(log: Log, place: Place) -> int:
    writer = await log.writer()
    offset = await writer.write(
        Emit(topic=place.topic, partition=place.partition, key=b"k", value=b"v")
    )
    await writer.close()
    return offset


async def committed(log: Log) -> dict[Place, int]:
    return await log.committed(group=NEEDED_GROUP, places=[REQUESTED, FINISHED])


async def until(look: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(2000):
        if await look():
            return
        await asyncio.sleep(EVERY_S)
    raise AssertionError("it did not happen in time")


async def committed_at_end(log: Log) -> bool:
    return await committed(log) == await log.end_positions([REQUESTED, FINISHED])


async def test_a_gateway_fenced_by_one_that_died_commits_again() -> None:
    log = MemoryLog(run="r")
    await log.create_topics(TOPICS)
    gateway = MarkingGateway(log)
    async with gateway.marking() as marking:
        await write(log, FINISHED)
        await until(lambda: committed_at_end(log))
        await (await log.open().transaction_writer(NEEDED_GROUP)).close()
        await write(log, FINISHED)
        await until(lambda: committed_at_end(log))
        assert not marking.done()
    assert gateway.events() == ["needed_fenced"]


async def test_a_group_that_opens_while_a_gateway_is_fenced_is_needed_by_its_next_commit() -> None:
    log = MemoryLog(run="r")
    await log.create_topics(TOPICS)
    gateway = MarkingGateway(log)

    async def is_fenced() -> bool:
        return bool(gateway.events())

    async def is_back() -> bool:
        return await committed(log) != older

    async with gateway.marking():
        await write(log, FINISHED)
        await until(lambda: committed_at_end(log))
        older = await committed(log)
        await (await log.open().transaction_writer(NEEDED_GROUP)).close()
        await write(log, FINISHED)
        await until(is_fenced)
        gateway.open_groups.add("a")
        needed = {REQUESTED: await write(log, REQUESTED), FINISHED: await write(log, FINISHED)}
        await gateway.read_requests()
        await until(is_back)
        assert await committed(log) == needed
        await write(log, FINISHED)
        await asyncio.sleep(10 * EVERY_S)
        assert await committed(log) == needed
        gateway.open_groups.clear()
        await until(lambda: committed_at_end(log))


async def test_nothing_is_committed_beyond_a_group_that_was_not_read_yet() -> None:
    log = MemoryLog(run="r")
    await log.create_topics(TOPICS)
    gateway = MarkingGateway(log)
    async with gateway.marking():
        await write(log, FINISHED)
        await until(lambda: committed_at_end(log))
        needed = {REQUESTED: await write(log, REQUESTED), FINISHED: await write(log, FINISHED)}
        await asyncio.sleep(10 * EVERY_S)
        assert await committed(log) == needed
        gateway.open_groups.add("a")
        await gateway.read_requests()
        await write(log, FINISHED)
        await asyncio.sleep(10 * EVERY_S)
        assert await committed(log) == needed


async def test_a_log_that_fails_ends_no_gateway_and_is_marked_once_it_works() -> None:
    """Topics that do not exist are a LogError, as a broker that does not answer is."""
    log = MemoryLog(run="r")
    gateway = MarkingGateway(log)
    async with gateway.marking() as marking:
        await asyncio.sleep(5 * EVERY_S)
        assert not marking.done()
        await log.create_topics(TOPICS)
        await write(log, FINISHED)
        await until(lambda: committed_at_end(log))
    assert set(gateway.events()) == {"needed_failed"}


async def test_two_live_gateways_alternate_and_fence_each_other_rarely() -> None:
    log = MemoryLog(run="r")
    await log.create_topics(TOPICS)
    gateways = [MarkingGateway(log), MarkingGateway(log.open())]
    rounds = 100
    async with gateways[0].marking(), gateways[1].marking():
        for _ in range(rounds):
            await write(log, FINISHED)
            await asyncio.sleep(EVERY_S)
        await until(lambda: committed_at_end(log))
    fenced = [gateway.events().count("needed_fenced") for gateway in gateways]
    assert 2 <= sum(fenced) <= 2 * (rounds // 20 + 1)
    assert all(fenced)


async def test_a_group_that_opens_while_a_mark_is_taken_lies_behind_all_of_it() -> None:
    log = MemoryLog(run="r")
    await log.create_topics(TOPICS)
    first: dict[Place, int] = {}

    async def end_positions(places: Sequence[Place]) -> dict[Place, int]:
        """The first records' partition answers before the others; then a group begins."""
        ends: dict[Place, int] = {}
        for place in sorted(places, key=lambda place: place != REQUESTED):
            ends |= await log.end_positions([place])
            if place == REQUESTED:
                for written in (REQUESTED, FINISHED):
                    first[written] = await write(log, written)
        return ends

    mark = await take_mark(end_positions, first=[REQUESTED], other=[FINISHED])
    assert mark == first


# Two gateways read independently; each commits what it found to be needed at any later time.
# A step is (kind, group, gateway).
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["request", "write", "write", "retire", "read", "read", "mark", "find", "commit"]
        ),
        st.integers(0, 3),
        st.integers(0, 1),
    ),
    min_size=60,
    max_size=120,
)


@dataclass
class Overlapping:
    """One of several gateways; the steps decide how late it reads and commits."""

    oldest: OldestMark = field(default_factory=lambda: OldestMark({REQUESTED: 0, FINISHED: 0}))
    requests_read: int = 0
    mark: dict[Place, int] | None = None
    found: dict[Place, int] | None = None
    retired: frozenset[str] = frozenset()


@pytest.mark.slow
@given(STEPS)
def test_no_gateway_commits_beyond_what_another_one_needs(
    steps: Sequence[tuple[str, int, int]],
) -> None:
    requests: list[str] = []
    written: list[str] = []
    retired: set[str] = set()
    position = {REQUESTED: 0, FINISHED: 0}
    gateways = (Overlapping(), Overlapping())
    for kind, number, one in steps:
        group, gateway = f"g-{number}", gateways[one]
        match kind:
            case "request" if group not in requests:
                requests.append(group)
            case "write" if group in requests:
                written.append(group)
            case "retire" if group in requests:
                retired.add(group)
            case "read":
                gateway.requests_read = len(requests)
                gateway.retired = frozenset(retired)
            case "mark" if gateway.mark is None:
                gateway.mark = {REQUESTED: len(requests), FINISHED: len(written)}
            case "find" if gateway.mark and gateway.requests_read >= gateway.mark[REQUESTED]:
                open_groups = set(requests[: gateway.requests_read]) - gateway.retired
                gateway.found = gateway.oldest.accept(gateway.mark, open_groups=open_groups)
                gateway.mark = None
            case "commit" if gateway.found is not None:
                position = gateway.found
        assert retired.issuperset(requests[: position[REQUESTED]])
        assert retired.issuperset(written[: position[FINISHED]])
