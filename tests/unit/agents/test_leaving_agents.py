"""Agents that end in ways that are no error of Python, as by `sys.exit`."""

import asyncio
import sys

import msgspec
import pytest

from forgemq_agents.app import EXIT_FAILED, played
from forgemq_agents.user_code import UserCodeError, load_domains
from forgemq_contracts.admin import AbortRequest
from forgemq_contracts.run import Evaluation
from forgemq_telemetry.telemetry import Telemetry
from tests.unit.agents.agent_run import configuration, play


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


def test_a_module_that_exits_as_it_is_imported_is_refused_with_its_field(tmp_path, monkeypatch):
    (tmp_path / "script_of_mine.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    run = configuration(evaluation=Evaluation())
    fields = {"agent": "script_of_mine:play", "task_source": "json:loads"}
    queues = (msgspec.structs.replace(run.queues[0], **fields),)
    with pytest.raises(UserCodeError) as refused:
        load_domains(msgspec.structs.replace(run, queues=queues))
    assert str(refused.value) == (
        "queues.count.agent: 'script_of_mine:play' ends its process as it is imported"
    )
