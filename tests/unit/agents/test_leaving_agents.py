"""Agents that end in ways that are no error of Python, as by `sys.exit`."""

import asyncio
import sys

import pytest

from forgemq_agents.app import EXIT_FAILED, played
from forgemq_contracts.admin import AbortRequest
from forgemq_telemetry.telemetry import Telemetry
from tests.unit.agents.agent_run import play


class Panic(BaseException):
    """As packages written in Rust raise it."""


@pytest.mark.parametrize("error", [SystemExit(0), asyncio.CancelledError("lost"), Panic("index")])
async def test_whatever_an_agent_raises_aborts_its_episode(memory_gateway, error):
    gateway = await memory_gateway()

    async def leaving(episode) -> None:
        raise error

    await play(gateway, leaving)
    ends = [end for group in gateway.in_order() for end in group.ended.values()]
    assert set(ends) == {AbortRequest(detail=f"{type(error).__name__}: {error}")}


def test_a_process_that_a_task_of_an_agent_exits_has_failed_and_says_why(capsys):
    async def leave() -> None:
        sys.exit(0)

    async def playing() -> None:
        await asyncio.gather(leave(), asyncio.sleep(60))

    assert played(playing(), Telemetry(service="agents")) == EXIT_FAILED
    assert '"error":"code of the run ended this process: SystemExit(0)"' in capsys.readouterr().err
