"""The console as its own process on a real broker, seen through HTTP."""

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import pytest

from forgemq.bus.blobs import BlobStore
from forgemq.bus.kafka import KafkaConnection, KafkaLog
from forgemq.contracts.messages import Output
from forgemq.contracts.topics import BY_NAME, FINISHED_COMPLETIONS
from forgemq.launcher.topics_of_run import announce, create_topics
from forgemq.shell.records import emit_of
from tests.unit.run_view.synthetic import SyntheticRun, started

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
MODEL = Path(__file__).parents[2] / "deploy" / "demo" / "model"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
    await announce(connection, begin)
    environ = {
        **os.environ,
        "FORGEMQ_RUN": run_id,
        "FORGEMQ_KAFKA": kafka_bootstrap,
        "FORGEMQ_CONSOLE_PORT": str(port),
    }
    run = SyntheticRun(run=run_id).play(steps=1)
    await write(log, run, first=0)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "forgemq.console", env=environ
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
    finally:
        process.terminate()
        assert await process.wait() == 0
        await log.close()
