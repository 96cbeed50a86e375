"""Whoever waits for a promise to be written gets an answer, also from a gateway that ends."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from forgemq_bus.errors import LogUnavailableError
from forgemq_bus.log import Emit
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_gateway.core.gateways import Gateways
from forgemq_gateway.fenced_writer import FencedWriter
from forgemq_gateway.ownership import PLACE, ReadBack
from tests.unit.gateway.hindered_log import HinderedLog
from tests.unit.gateway.scripted_lane import wall_ms
from tests.unit.gateway.test_gateways import owned

EMIT = Emit(topic=topics.OPENED_EPISODES.name, partition=0, key=b"", value=b"")


class EndedError(Exception):
    pass


async def _log_of(before: Callable[[Emit], Awaitable[None]]) -> HinderedLog:
    """A log that waits for this before each commit of an episode."""
    log = HinderedLog(MemoryLog(run="r", clock_ms=wall_ms).open(), before)
    await log.create_topics({PLACE.topic: 1, topics.OPENED_EPISODES.name: 1})
    return log


def _gateway() -> Gateways:
    """One that serves the only partition, by change 1 of owners."""
    gateways = Gateways("a", url="http://a", partitions=1)
    gateways.take_owners(owned(1, a=(0,)))
    gateways.serving.add(0)
    return gateways


@pytest.mark.parametrize("yields", [1, 50], ids=["before its first step", "in a commit"])
async def test_a_write_fails_with_a_clear_error_if_its_gateway_ends_meanwhile(
    yields: int,
) -> None:
    committing = asyncio.Event()

    async def never(_: Emit) -> None:
        committing.set()
        await asyncio.Event().wait()

    log, gateways = await _log_of(never), _gateway()
    writes: list[asyncio.Task[None]] = []

    async def run_gateway() -> None:
        async with asyncio.TaskGroup() as tasks:
            fenced = FencedWriter(log, gateways=gateways, read_back=ReadBack(log), tasks=tasks)
            write = fenced.write(EMIT, group_id="g", tenure=1)
            writes.append(asyncio.create_task(write))
            for _ in range(yields):
                await asyncio.sleep(0)
            raise EndedError

    with pytest.raises(ExceptionGroup):
        await run_gateway()
    assert committing.is_set() == (yields > 1)
    with pytest.raises(LogUnavailableError, match="has ended"):
        await asyncio.wait_for(writes[0], 1)


async def test_a_write_behind_the_last_one_of_a_gateway_that_ends_fails_with_a_clear_error() -> (
    None
):
    """The task that commits has ended, and the group of tasks takes no other one."""
    committing, may_commit = asyncio.Event(), asyncio.Event()

    async def hold(_: Emit) -> None:
        committing.set()
        await may_commit.wait()

    log, gateways = await _log_of(hold), _gateway()
    writes: list[asyncio.Task[None]] = []
    async with asyncio.TaskGroup() as tasks:
        fenced = FencedWriter(log, gateways=gateways, read_back=ReadBack(log), tasks=tasks)

        async def write_twice() -> None:
            await fenced.write(EMIT, group_id="g", tenure=1)
            await fenced.write(EMIT, group_id="g", tenure=1)

        writes.append(asyncio.create_task(write_twice()))
        await committing.wait()
        may_commit.set()
    with pytest.raises(LogUnavailableError, match="has ended"):
        await asyncio.wait_for(writes[0], 1)
