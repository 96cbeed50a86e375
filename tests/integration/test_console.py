"""The console as its own process on a real broker, seen through HTTP."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import pytest

from forgemq_bus.blobs import BlobStore
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_bus.log import Place
from forgemq_contracts.audit import AuditedGroup
from forgemq_contracts.messages import Output
from forgemq_contracts.topics import (
    AUDITED_GROUPS,
    BY_NAME,
    FINISHED_COMPLETIONS,
    MERGED_TREES,
    decode,
)
from forgemq_launcher.records.run_topics import create_topics, write_start
from forgemq_shell.records import emit_of
from forgemq_shell.trimming import trim
from tests.ports import free_port
from tests.unit.run_view.synthetic import SyntheticRun, started

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
MODEL = Path(__file__).parents[2] / "deploy" / "demo" / "model"


async def write(log: KafkaLog, run: SyntheticRun, *, first: int) -> None:
    """The run's messages from this one on, in transactions where the registry says so."""
    writer, transactions = await log.writer(), await log.transaction_writer("test")
    for message in run.messages[first:]:
        output = Output(topic=message.topic, partition=message.partition, record=message.record)
        if BY_NAME[message.topic].is_transactional:
            await transactions.commit(outputs=[emit_of(output)], group="test", positions={})
        else:
            await writer.write(emit_of(output))


async def state_when(http: httpx.AsyncClient, holds: Callable[[dict], bool]) -> dict:
    async with asyncio.timeout(90):
        while True:
            try:
                state = (await http.get("/api/state")).json()
                if holds(state):
                    return state
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)


async def audited_when(log: KafkaLog, *, count: int) -> dict[str, int]:
    """Samples in the tree of each audited group, once there are so many groups."""
    found: dict[str, int] = {}
    async with asyncio.timeout(60):
        reader = await log.reader({Place(AUDITED_GROUPS.name, n): 0 for n in range(2)})
        while len(found) < count:
            for record in await reader.read(timeout_s=1, records_max=10):
                group = decode(AUDITED_GROUPS, record.value)
                assert isinstance(group, AuditedGroup)
                assert group.group_id not in found
                found[group.group_id] = sum(len(each.completion_ids) for each in group.trees)
        await reader.close()
    return found


async def trimmed_for_others(log: KafkaLog) -> set[str]:
    """Every other reader says that it needs nothing; returns the topics that could be trimmed."""
    places = [Place(t.name, n) for t in (FINISHED_COMPLETIONS, MERGED_TREES) for n in range(2)]
    ends = await log.end_positions(places)
    for group in {*FINISHED_COMPLETIONS.needed_by, *MERGED_TREES.needed_by} - {"console-needed"}:
        writer = await log.transaction_writer(f"test-{group}")
        await writer.commit(outputs=(), group=group, positions=ends)
        await writer.close()
    freed = await trim(log, started().configuration)
    assert await log.first_positions(places) == ends
    return set(freed)


async def test_the_page_follows_a_run_and_shows_its_tokens(kafka_bootstrap, new_run_id, tmp_path):
    run_id, port = new_run_id(), free_port()
    connection = KafkaConnection(bootstrap=kafka_bootstrap)
    begin = started(run=run_id)
    begin = msgspec.structs.replace(
        begin,
        blobs=str(tmp_path / "blobs"),
        configuration=msgspec.structs.replace(
            begin.configuration,
            model=msgspec.structs.replace(begin.configuration.model, path=str(MODEL)),
        ),
    )
    # Completions above 300 bytes lie in the blob store, as those of long contexts do.
    log = KafkaLog(connection, run=run_id, blobs=BlobStore(begin.blobs), inline_bytes_max=300)
    await create_topics(log, begin.configuration)
    await write_start(connection, begin)
    environ = {
        **os.environ,
        "FORGEMQ_RUN": run_id,
        "FORGEMQ_KAFKA": kafka_bootstrap,
        "FORGEMQ_CONSOLE_PORT": str(port),
        "FORGEMQ_CONSOLE_AUDIT_EVERY_S": "0.2",
    }
    run = SyntheticRun(run=run_id).play(steps=1)
    await write(log, run, first=0)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "forgemq_console", env=environ
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as http:
            await state_when(http, lambda state: state["steps_trained"] == 1)
            written = len(run.messages)
            run.train(1, [run.generate(2 + i, version=1) for i in range(2)])
            await write(log, run, first=written)
            state = await state_when(http, lambda state: state["groups_open"] == 0)
            assert (state["steps_trained"], state["groups_admitted"]) == (2, 4)
            assert state["completions"] == len(list(run.of(FINISHED_COMPLETIONS)))
            group = (await http.get("/api/groups/g-3")).json()
            tokens = group["episode"]["turns"][0]["output"]
            assert [token["id"] for token in tokens] == [20, 30, 2]
            assert tokens[0]["logprob"] == -0.25
            audited = await audited_when(log, count=4)
            assert audited == {f"g-{number}": 4 for number in range(4)}
            # What the audit was the last to need is deleted; the page has counted it.
            assert await trimmed_for_others(log) == {"finished-completions-v1", "merged-trees-v1"}
            await asyncio.sleep(1.0)
            state = (await http.get("/api/state")).json()
            assert state["completions"] == len(list(run.of(FINISHED_COMPLETIONS)))
            assert (await http.get("/api/groups/g-3")).json()["episode"] is None
    finally:
        process.terminate()
        assert await process.wait() == 0
        await log.close()
