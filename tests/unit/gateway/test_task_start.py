"""A request that comes at the moment when an error ends the gateway."""

import asyncio

import pytest

from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.task_start import start_task


async def answer() -> str:
    return "answered"


async def end() -> None:
    raise OSError("the log is gone")


async def test_what_is_started_runs_in_the_gateways_group() -> None:
    async with asyncio.TaskGroup() as tasks:
        task = start_task(tasks, answer())
    assert task.result() == "answered"


async def test_a_request_at_the_moment_of_the_end_is_a_503_that_may_be_asked_again() -> None:
    refusals: list[RefusedError] = []

    async def ask(tasks: asyncio.TaskGroup) -> None:
        try:
            await asyncio.sleep(3600)
        finally:  # The group is cancelled, and this request has not ended yet.
            with pytest.raises(RefusedError) as refused:
                start_task(tasks, answer())
            refusals.append(refused.value)

    async def serve() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ask(tasks))
            tasks.create_task(end())

    with pytest.raises(ExceptionGroup):
        await asyncio.wait_for(serve(), 5)
    assert [(error.status, error.retry_after_s) for error in refusals] == [(503, 1)]
