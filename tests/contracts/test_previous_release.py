"""The contracts and cores of the previous release, side by side with the present ones."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from forgemq_contracts import generate, topics
from forgemq_contracts.compatibility import (
    added_fields,
    breaking_changes,
    is_settings,
    renamed,
    schemas,
)
from forgemq_contracts.examples import full, minimal
from forgemq_contracts.run import RunConfiguration, StartedRun
from forgemq_launcher.dispatch import run_tool
from tests.architecture.test_docs import DEFAULTS
from tests.compatibility_page import missed_fields, new_settings, order
from tests.contracts.frozen_snapshots import FOLDER as SNAPSHOTS
from tests.contracts.frozen_snapshots import transform_of
from tests.previous_release import (
    ROOT,
    Release,
    previous_contracts,
    previous_file,
    previous_release,
)
from tests.unit.shell.task_world import World

SERVICES = {topic.producer for topic in topics.OF_RUN} | {"agents", "console"}

READ = """
import json, sys
import msgspec
from forgemq_contracts import topics

for line in sys.stdin:
    name, value = json.loads(line)
    try:
        topics.decode(topics.BY_NAME[name], bytes.fromhex(value))
        print("read")
    except (msgspec.MsgspecError, KeyError) as error:
        print(f"refused: {error}")
"""

WRITE = """
import json
from forgemq_contracts import topics
from forgemq_contracts.examples import full

for topic in topics.ALL:
    print(json.dumps([topic.name, topics.encode(full(topic.record)).hex()]))
"""

VARIABLES = """
from tests.architecture.test_docs import DEFAULTS

print(*DEFAULTS, sep="\\n")
"""

GO_ON = """
import sys
from tests.contracts.frozen_snapshots import fresh_core

core = fresh_core(sys.argv[1])
core.restore(sys.stdin.buffer.read())
again = fresh_core(sys.argv[1])
again.restore(core.snapshot())
assert again.snapshot() == core.snapshot()
print(len(core.snapshot()))
"""


RESTORE = """
import asyncio, sys
from forgemq_bus.log import Emit
from forgemq_shell.journal import snapshot_headers
from forgemq_shell.restore import NewerLogicError, restore
from forgemq_telemetry import Telemetry
from tests.simulation.counting_core import CountingCore
from tests.unit.shell.task_world import JOURNAL, QUIET, World


async def main():
    world, sequence = World(), int(sys.argv[1])
    await world.open()
    journalled = Emit(
        topic=JOURNAL.topic,
        partition=0,
        key=b"",
        value=sys.stdin.buffer.read(),
        headers=snapshot_headers(sequence),
    )
    await world.write([journalled])
    plan = world.plan(QUIET, tick_s=0.0, logic_version=1)
    telemetry = Telemetry(service="merger", stream=world.lines)
    try:
        restored = await restore(plan, log=world.log, core=CountingCore(), telemetry=telemetry)
        print("goes on with batch", restored.sequence)
    except NewerLogicError:
        print("refused")


asyncio.run(main())
"""


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return previous_release(tmp_path_factory.mktemp("previous"))


def run(release: Release, code: str, *arguments: str, given: bytes = b"") -> list[str]:
    """Lines that a program prints with the packages of a release."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        input=given,
        env={**os.environ, "PYTHONPATH": release.python_path()},
        capture_output=True,
        cwd=release.root,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()


def test_what_is_frozen_is_what_the_previous_release_has():
    frozen = previous_contracts()
    assert frozen["schemas"] == json.loads(previous_file("contracts/schemas.json"))
    api = json.loads(previous_file("contracts/openapi.json"))
    assert frozen["http"] == api["components"]["schemas"]
    routes = {f"{how.upper()} {path}" for path, methods in api["paths"].items() for how in methods}
    assert set(frozen["routes"]) == routes


def test_the_gateways_routes_and_bodies_are_those_of_the_previous_release_or_more():
    frozen, present = previous_contracts(), generate.frozen()
    assert set(frozen["routes"]) <= set(present["routes"])
    assert breaking_changes(frozen["http"], present["http"]) == []


def test_every_field_that_the_previous_release_does_not_know_is_on_the_page():
    present, settings = schemas(), new_settings()
    added = added_fields(renamed(previous_contracts()["schemas"]), present)
    of_run_file = {each for each in added if is_settings(present[each.split(".")[0]])}
    assert sorted(settings) == sorted(of_run_file)
    assert sorted(row.field for row in missed_fields()) == sorted(set(added) - of_run_file)


def test_every_topic_that_the_previous_release_does_not_know_is_on_the_page():
    new = {topic.name for topic in topics.ALL} - set(previous_contracts()["topics"])
    page = (ROOT / "docs/compatibility.md").read_text()
    assert [name for name in sorted(new) if f"`{name}`" not in page] == []


def test_who_must_be_upgraded_before_a_field_is_written_comes_first_in_the_order():
    places = {service: number for number, service in enumerate(order())}
    assert set(places) == SERVICES - {"launcher"}
    late = [
        (row.field, reader, writer)
        for row in missed_fields()
        for reader in row.before
        for writer in row.writers
        if places[reader] >= places[writer]
    ]
    assert late == []


def wire(topic: topics.Topic, record: Any) -> bytes:
    return json.dumps([topic.name, topics.encode(record).hex()]).encode()


@pytest.mark.slow
def test_the_previous_release_reads_every_record_of_this_one_but_a_run_with_newer_settings(
    release: Release,
):
    known = [topic for topic in topics.ALL if topic.name in previous_contracts()["topics"]]
    records = [(topic, make) for topic in known for make in (minimal, full)]
    lines = b"\n".join(wire(topic, make(topic.record)) for topic, make in records)
    answers = run(release, READ, given=lines)
    refused = {
        (topic.name, make.__name__): answer
        for (topic, make), answer in zip(records, answers, strict=True)
        if answer != "read"
    }
    assert list(refused) == [(topics.STARTED_RUNS.name, "full")]
    assert "unknown field" in refused[topics.STARTED_RUNS.name, "full"]


@pytest.mark.slow
def test_the_previous_release_reads_the_demos_run_as_this_one_announces_it(
    release: Release, tmp_path: Path
):
    """The file sets nothing that the previous release does not know."""
    given = ["resolve", str(ROOT / "deploy/demo/run.toml"), "--to", str(tmp_path / "run.json")]
    assert run_tool(given, environ={"FORGEMQ_RUN": "demo"}, console=Console(quiet=True)) == 0
    configuration = msgspec.json.decode((tmp_path / "run.json").read_bytes(), type=RunConfiguration)
    started = StartedRun(run="demo", configuration=configuration, blobs="blobs", started_ms=1)
    assert run(release, READ, given=wire(topics.STARTED_RUNS, started)) == ["read"]


@pytest.mark.slow
def test_this_release_reads_every_record_of_the_previous_one(release: Release):
    lines = run(release, WRITE)
    assert len(lines) > 20
    for line in lines:
        name, value = json.loads(line)
        topic = topics.BY_NAME[name]
        record = topics.decode(topic, bytes.fromhex(value))
        written = msgspec.msgpack.decode(bytes.fromhex(value))
        assert set(written) <= set(msgspec.structs.asdict(record))


@pytest.mark.slow
@pytest.mark.parametrize(("since", "said"), [(1, "goes on with batch 2"), (2, "refused")])
async def test_the_previous_release_goes_on_behind_a_clean_stop_if_the_snapshot_names_its_logic(
    release: Release, since: int, said: str
):
    world = World()
    await world.open()
    async with world.task(logic_version=2, snapshots_since=since):
        await world.score("a")
        await world.until_merged(1)
    *_, snapshot = await world.journal()
    given = topics.encode(snapshot)
    assert run(release, RESTORE, str(snapshot.sequence), given=given) == [said]


@pytest.mark.slow
def test_every_variable_that_the_previous_release_reads_is_still_read(release: Release):
    variables = set(run(release, VARIABLES))
    assert "FORGEMQ_GATEWAY_ADMIN_KEY" in variables
    assert variables - set(DEFAULTS) == set()


@pytest.mark.slow
@pytest.mark.parametrize("service", ["merger", "reward", "scheduler"])
def test_a_core_of_the_previous_release_goes_on_from_this_ones_snapshot(
    release: Release, service: str
):
    transform, before = transform_of(service), release.logic_version(service)
    if before < (transform.snapshots_since or transform.logic_version):
        pytest.skip(f"logic version {before} of {service} does not go on from this one's snapshots")
    stored = (SNAPSHOTS / f"{service}-{transform.logic_version}.msgpack").read_bytes()
    (kept,) = run(release, GO_ON, service, given=stored)
    assert int(kept) > 0


def test_a_clone_without_the_history_skips(tmp_path: Path):
    with pytest.raises(pytest.skip.Exception, match=r"previous release, v0\.0\.0-none: "):
        previous_release(tmp_path, revision="v0.0.0-none")
