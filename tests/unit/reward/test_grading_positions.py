"""Who commits the grading's positions: the owner of a partition, and nobody after it."""

import asyncio
import io
import json

import pytest

from forgemq_bus.log import Place, TransactionWriter
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_reward.core.pending import PendingPositions
from forgemq_reward.grading_positions import GROUP, GradingPositions
from forgemq_telemetry import Telemetry

PARTITIONS = 4
COMPLETIONS = topics.FINISHED_COMPLETIONS.name


class SlowLog:
    """Opening a transactional writer takes tens of milliseconds, as on a broker."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log
        self.committed = log.committed

    async def transaction_writer(self, transactional_id: str) -> TransactionWriter:
        await asyncio.sleep(0.03)
        return await self._log.transaction_writer(transactional_id)


class Owner:
    """A process that grades, as its positions see it."""

    def __init__(self, log: MemoryLog) -> None:
        self._lines = io.StringIO()
        telemetry = Telemetry(service="reward", stream=self._lines)
        self.positions = GradingPositions(SlowLog(log.open()), telemetry)

    async def commit_all(self, partitions: range, completions: int) -> None:
        for partition in partitions:
            await self.positions.commit(partition, read_to(completions))

    def fenced(self) -> list[int]:
        lines = [json.loads(line) for line in self._lines.getvalue().splitlines()]
        return [line["partition"] for line in lines if line["event"] == "grading_fenced"]


def read_to(completions: int) -> PendingPositions:
    return PendingPositions(episodes=None, completions=completions, grades=None)


async def committed(log: MemoryLog) -> dict[int, int]:
    places = [Place(COMPLETIONS, number) for number in range(PARTITIONS)]
    positions = await log.committed(group=GROUP, places=places)
    return {place.partition: position for place, position in positions.items()}


@pytest.fixture
async def log() -> MemoryLog:
    log = MemoryLog(run="r")
    await log.create_topics({topic.name: PARTITIONS for topic in topics.OF_RUN})
    return log


async def test_a_rebalance_during_commits_fences_no_new_owner_and_moves_no_position_back(log):
    old, new = Owner(log), Owner(log)
    for partition in range(PARTITIONS):
        await old.positions.take_over(partition)
    async with asyncio.TaskGroup() as group:
        group.create_task(old.commit_all(range(PARTITIONS), 5))
        await old.positions.give_up(frozenset({2, 3}))
        for partition in (2, 3):
            await new.positions.take_over(partition)
        await new.commit_all(range(2, 4), 9)
    await old.commit_all(range(PARTITIONS), 6)
    await new.commit_all(range(2, 4), 11)
    assert await committed(log) == {0: 6, 1: 6, 2: 11, 3: 11}
    assert (old.fenced(), new.fenced()) == ([], [])


async def test_a_restart_finds_what_the_previous_owner_committed(log):
    old, new = Owner(log), Owner(log)
    assert await old.positions.take_over(0) == {}
    await old.positions.commit(0, PendingPositions(episodes=3, completions=8, grades=2))
    await old.positions.close()
    assert await new.positions.take_over(0) == {
        Place(topics.FINISHED_EPISODES.name, 0): 3,
        Place(COMPLETIONS, 0): 8,
        Place(topics.GRADED_EPISODES.name, 0): 2,
    }


async def test_an_owner_that_a_zombie_fenced_takes_the_partition_back(log):
    owner, zombie = Owner(log), Owner(log)
    await owner.positions.take_over(1)
    await zombie.positions.take_over(1)
    await owner.positions.commit(1, read_to(7))
    assert (owner.fenced(), await committed(log)) == ([1], {})
    await owner.positions.commit(1, read_to(7))
    assert await committed(log) == {1: 7}
    await zombie.positions.commit(1, read_to(4))
    assert zombie.fenced() == [1]


async def test_a_zombie_that_takes_a_partition_back_moves_no_position_back(log):
    zombie, owner = Owner(log), Owner(log)
    await zombie.positions.take_over(1)
    await owner.positions.take_over(1)
    await owner.positions.commit(1, read_to(9))
    for _ in range(2):
        await zombie.positions.commit(1, read_to(4))
    assert zombie.fenced() == [1]
    assert await committed(log) == {1: 9}
