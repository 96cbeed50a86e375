"""`forgemq create` on a real broker: which run it announces, and what it says to type next."""

import asyncio
import io
import json
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

from forgemq_bus.broker import LocalBroker
from forgemq_bus.broker.local import folder_ports
from forgemq_bus.errors import UnknownPlaceError
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_bus.log import Place
from forgemq_contracts.run import StartedRun
from forgemq_contracts.topics import REPORTED_ENGINES, SCORED_GROUPS, Topic
from forgemq_launcher.dispatch import run_tool
from forgemq_settings.ports import free_port
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

    def run(*overrides: str, run_id: str = "", **variables: str) -> str:
        console = Console(file=io.StringIO(), width=200)
        given = {**environ, "FORGEMQ_RUN": run_id, **variables}
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


def test_of_runs_that_are_created_at_the_same_time_each_gets_a_number_of_its_own(create):
    with ThreadPoolExecutor() as threads:
        printed = list(threads.map(lambda _: create(), range(3)))
    names = [text.split()[1] for text in printed]
    assert len(set(names)) == 3, names


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
    printed = create("trainer.steps=8", run_id=given)
    assert printed.startswith(f"run {given} is announced again with trainer.steps: 7 -> 8\n")
    assert "announced again" not in create("trainer.steps=8", run_id=given)
    blobs, moved = environ["FORGEMQ_BLOBS"], f"{environ['FORGEMQ_BLOBS']}-2"
    printed = create("trainer.steps=8", run_id=given, FORGEMQ_BLOBS=moved)
    assert printed.startswith(f"run {given} is announced again with blobs: {blobs!r} -> {moved!r}")
    assert announced(environ, given).configuration.trainer.steps == 8
    assert announced(environ, given).started_ms > first.started_ms


def test_a_run_that_is_announced_refuses_by_name_what_must_stay_and_takes_more_room_for_lanes(
    create, environ, new_run_id
):
    given = new_run_id()
    create(run_id=given)
    for change, words in (
        (
            "log.group_partitions=4",
            "log.group_partitions was 2 when this run was trained, and is 4",
        ),
        ("seed=5", "seed was 0 when this run was trained, and is 5 now: the tasks that were asked"),
    ):
        console = Console(file=io.StringIO(), width=200)
        called = {**environ, "FORGEMQ_RUN": given}
        assert run_tool(["create", str(DEMO), change], environ=called, console=console) == 2
        assert f"forgemq: {words}" in console.file.getvalue()
    create("log.lanes_max=3", run_id=given)
    assert announced(environ, given).changes == ("log.lanes_max: None -> 3",)
    assert announced(environ, given).configuration.log.group_partitions == 2
    assert asyncio.run(partitions(environ, given, REPORTED_ENGINES)) == 3
    assert asyncio.run(partitions(environ, given, SCORED_GROUPS)) == 2


def test_a_run_that_is_announced_refuses_other_tasks_and_says_which_were_added(
    environ, new_run_id, tmp_path
):
    file, run_id = tmp_path / "tasks.jsonl", new_run_id()
    lines = [f"{json.dumps({'number': number})}\n" for number in range(4)]

    def create() -> tuple[int, str]:
        console = Console(file=io.StringIO(), width=200)
        files = ("queues.0.task_source=", f"queues.0.task_file={file}", "evaluation.tasks=0")
        called = {**os.environ, **environ, "FORGEMQ_RUN": run_id}
        status = run_tool(["create", str(DEMO), *files], environ=called, console=console)
        return status, console.file.getvalue()

    file.write_text("".join(lines[:3]))
    assert create()[0] == 0
    first = announced(environ, run_id)
    assert [each.count for each in first.tasks] == [3]
    file.write_text("".join(reversed(lines[:3])))
    status, printed = create()
    assert (status, "task_file: the run has had 3 tasks, and as many" in printed) == (2, True)
    assert announced(environ, run_id) == first
    file.write_text("".join(lines))
    told = f"run {run_id} is announced again with queues.shop_desk.task_file: 3 tasks -> 4 tasks"
    assert told in create()[1]
    assert [each.count for each in announced(environ, run_id).tasks] == [4]
    assert "announced again" not in create()[1]


def test_a_run_that_was_deleted_is_announced_anew_though_its_old_start_is_on_the_log(
    create, environ, new_run_id
):
    given = new_run_id()
    create(run_id=given)
    first = announced(environ, given)
    console = Console(file=io.StringIO(), width=200)
    assert run_tool(["delete", given, "--yes"], environ=environ, console=console) == 0
    create(run_id=given)
    again = announced(environ, given)
    assert again.configuration == first.configuration
    assert again.started_ms > first.started_ms
    run_tool(["delete", given, "--yes"], environ=environ, console=console)
    create("seed=5", run_id=given)
    assert (announced(environ, given).configuration.seed, announced(environ, given).changes) == (
        5,
        (),
    )


async def partitions(environ: Mapping[str, str], run_id: str, topic: Topic) -> int:
    log = KafkaLog(KafkaConnection(bootstrap=environ["FORGEMQ_KAFKA"]), run=run_id)
    try:
        for count in range(100):
            try:
                await log.first_positions([Place(topic.name, count)])
            except UnknownPlaceError:
                return count
    finally:
        await log.close()
    raise AssertionError(f"{topic.name} has 100 partitions or more")


@pytest.mark.long
def test_a_run_is_created_on_a_broker_that_starts_later_and_the_wait_is_said(tmp_path):
    """The broker is started when the command has said that it waits."""
    waits = threading.Event()
    port, _ = folder_ports(tmp_path / "ports.json")
    broker = LocalBroker(tmp_path)

    def start_later() -> None:
        waits.wait(60)
        broker.start()

    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            if "did not answer" in text:
                waits.set()
            return super().write(text)

    environ = {
        "FORGEMQ_KAFKA": f"127.0.0.1:{port}",
        "FORGEMQ_KAFKA_RETRY_S": "5",
        "FORGEMQ_BLOBS": str(tmp_path / "blobs"),
        "FORGEMQ_RUN": "late",
    }
    console = Console(file=Screen(), width=200)
    starting = threading.Thread(target=start_later)
    starting.start()
    try:
        assert run_tool(["create", str(DEMO)], environ=environ, console=console) == 0
    finally:
        starting.join()
        broker.stop()
    first, *_ = lines = console.file.getvalue().splitlines()
    assert first.startswith("waiting up to 120 s for the broker: open the admin connection: 127.0")
    assert [line for line in lines if line.startswith("run late is announced")]


def test_a_broker_that_never_answers_ends_the_command_within_its_time(tmp_path):
    environ = {
        "FORGEMQ_KAFKA": f"127.0.0.1:{free_port()}",
        "FORGEMQ_KAFKA_RETRY_S": "0.2",
        "FORGEMQ_SERVICE_START_TIMEOUT_S": "0.5",
        "FORGEMQ_BLOBS": str(tmp_path / "blobs"),
        "FORGEMQ_RUN": "never",
    }
    console = Console(file=io.StringIO(), width=200)
    assert run_tool(["create", str(DEMO)], environ=environ, console=console) == 1
    *waits, last = console.file.getvalue().splitlines()
    assert waits
    assert last.startswith("forgemq: broker: no broker answered within 0.5 s: is it up, and is")
