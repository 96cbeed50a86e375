"""Processes with a fixed place in their group, on a real broker."""

import asyncio
import time
from collections.abc import Callable

import pytest

from forgemq_bus.errors import FencedError
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_bus.log import Member

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(180)]


async def ignore(_: frozenset[int]) -> None:
    """Take what comes."""


async def joined(log: KafkaLog) -> Member:
    return await log.member(group="g", topics=["a"], on_assigned=ignore, on_revoked=ignore)


async def test_two_processes_that_are_one_instance_do_not_take_turns_for_ever(
    kafka_bootstrap: str, new_run_id: Callable[[], str]
):
    """Each heartbeat of one would replace the other; the setting is named instead."""
    run, began_s = new_run_id(), time.monotonic()
    logs = [
        KafkaLog(KafkaConnection(bootstrap=kafka_bootstrap), run=run, instance="merger-0")
        for _ in range(2)
    ]
    await logs[0].create_topics({"a": 2})
    members = [await joined(log) for log in logs]

    async def read_on(member: Member) -> None:
        while True:
            await member.read(timeout_s=0.2, records_max=1)

    async def read_all() -> None:
        async with asyncio.timeout(90), asyncio.TaskGroup() as group:
            for member in members:
                group.create_task(read_on(member))

    with pytest.raises(ExceptionGroup) as ended:
        await read_all()
    assert ended.group_contains(
        FencedError, match="is instance 'merger-0' too: FORGEMQ_SERVICE_INSTANCE must differ"
    )
    assert time.monotonic() - began_s < 60
    for log in logs:
        await log.close()
