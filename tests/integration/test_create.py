"""`forgemq create` on a real broker: which run it announces, and what it says to type next."""

import asyncio
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from rich.console import Console

from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_contracts.run import StartedRun
from forgemq_launcher.command_line import run_tool
from forgemq_shell.started_run import started_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

DEMO = Path(__file__).parents[2] / "deploy" / "demo" / "run.toml"

Create = Callable[..., str]


@pytest.fixture
def environ(kafka_bootstrap, tmp_path) -> Mapping[str, str]:
    return {"FORGEMQ_KAFKA": kafka_bootstrap, "FORGEMQ_BLOBS": str(tmp_path / "blobs")}


@pytest.fixture
def create(environ) -> Create:
    """Runs `forgemq create` on the demo's file; returns what it printed."""

    def run(*overrides: str, run_id: str = "") -> str:
        console = Console(file=io.StringIO(), width=200)
        given = {**environ, "FORGEMQ_RUN": run_id}
        assert run_tool(["create", str(DEMO), *overrides], environ=given, console=console) == 0
        return console.file.getvalue()

    return run


def announced(environ: Mapping[str, str], run_id: str) -> StartedRun:
    async def read() -> StartedRun:
        log = KafkaLog(KafkaConnection(bootstrap=environ["FORGEMQ_KAFKA"]), run=run_id)
        try:
            return await started_run(log, run_id, timeout_s=5.0)
        finally:
            await log.close()

    return asyncio.run(read())


def test_the_environments_run_is_announced_unless_an_override_names_another(
    create, environ, new_run_id
):
    given, override = new_run_id(), new_run_id()
    printed = create("trainer.steps=7", run_id=given)
    assert printed.startswith(f"run {given} is announced, its blobs are in")
    assert f"export FORGEMQ_RUN={given} FORGEMQ_KAFKA={environ['FORGEMQ_KAFKA']}\n" in printed
    assert announced(environ, given).configuration.trainer.steps == 7
    assert announced(environ, given).blobs == environ["FORGEMQ_BLOBS"]

    assert create(f"run={override}", run_id=given).startswith(f"run {override} is announced")
    assert announced(environ, override).configuration.trainer.steps == 40


def test_without_a_name_each_run_gets_the_next_number_that_the_broker_has_not_seen(create):
    first, second = (create().split()[1] for _ in range(2))
    name, _, number = first.rpartition("-")
    assert (name, second) == ("shop-desk", f"shop-desk-{int(number) + 1}")


def test_the_file_for_the_agents_names_the_same_run(create, environ, tmp_path):
    target = tmp_path / "configuration.json"
    console = Console(file=io.StringIO(), width=200)
    given = {**environ, "FORGEMQ_RUN": "by-hand"}
    assert (
        run_tool(["resolve", str(DEMO), "--to", str(target)], environ=given, console=console) == 0
    )
    assert json.loads(target.read_text())["run"] == "by-hand"


def test_a_run_that_is_announced_already_is_announced_again_only_if_it_changed(
    create, environ, new_run_id
):
    """A pod creates its run at every start; services that restart later read the newest record."""
    given = new_run_id()
    create("trainer.steps=7", run_id=given)
    first = announced(environ, given)
    create("trainer.steps=7", run_id=given)
    assert announced(environ, given) == first
    create("trainer.steps=8", run_id=given)
    assert announced(environ, given).configuration.trainer.steps == 8
    assert announced(environ, given).started_ms > first.started_ms
