"""Whoever waits for a promise to be written gets an answer, also from a gateway that ends."""

import asyncio

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


class EndedError(Exception):
    pass


@pytest.mark.parametrize("yields", [1, 50], ids=["before its first step", "in a commit"])
async def test_a_write_fails_with_a_clear_error_if_its_gateway_ends_meanwhile(
    yields: int,
) -> None:
    committing = asyncio.Event()

    async def never(_: Emit) -> None:
        committing.set()
        await asyncio.Event().wait()

    log = HinderedLog(MemoryLog(run="r", clock_ms=wall_ms).open(), never)
    await log.create_topics({PLACE.topic: 1, topics.OPENED_EPISODES.name: 1})
    gateways = Gateways("a", url="http://a", partitions=1)
    gateways.take_owners(owned(1, a=(0,)))
    gateways.serving.add(0)
    tenure = gateways.tenure("g")
    assert tenure is not None
    emit = Emit(topic=topics.OPENED_EPISODES.name, partition=0, key=b"", value=b"")
    writes: list[asyncio.Task[None]] = []

    async def run_gateway() -> None:
        async with asyncio.TaskGroup() as tasks:
            fenced = FencedWriter(log, gateways=gateways, read_back=ReadBack(log), tasks=tasks)
            write = fenced.write(emit, group_id="g", tenure=tenure)
            writes.append(asyncio.create_task(write))
            for _ in range(yields):
                await asyncio.sleep(0)
            raise EndedError

    with pytest.raises(ExceptionGroup):
        await run_gateway()
    assert committing.is_set() == (yields > 1)
    with pytest.raises(LogUnavailableError, match="has ended"):
        await asyncio.wait_for(writes[0], 1)
