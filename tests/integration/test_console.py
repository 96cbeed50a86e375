"""The console as its own process on a real broker, seen through HTTP."""

import asyncio
import os
import ssl
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
import msgspec
import pytest

from forgemq_bus.blobs import BlobStore
from forgemq_bus.kafka import KafkaConnection, KafkaLog
from forgemq_bus.log import Place
from forgemq_contracts.topics import FINISHED_COMPLETIONS
from forgemq_launcher.records.run_topics import create_topics, write_start
from tests.certificates import authority
from tests.integration.synthetic_log import write
from tests.ports import free_port
from tests.unit.run_view.synthetic import SyntheticRun, started

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
KEY = "the-key-of-this-page"
MODEL = Path(__file__).parents[2] / "deploy" / "demo" / "model"


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


def console_that_ends(environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """A console that is expected to end by itself."""
    command = [sys.executable, "-m", "forgemq_console"]
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=90, check=False
    )


async def secured_off_loopback(
    environ: Mapping[str, str], folder: Path
) -> tuple[dict[str, str], ssl.SSLContext]:
    """The environment with what a console needs for other machines, and how a client trusts it.

    Without a key it refuses to serve them.
    """
    outside = {**environ, "FORGEMQ_CONSOLE_HOST": "0.0.0.0"}
    refused = await asyncio.to_thread(console_that_ends, outside)
    assert (refused.returncode, refused.stderr.count("FORGEMQ_CONSOLE_KEY: must be set")) == (2, 1)
    ca = authority()
    certificate, key = ca.write_server(folder)
    secured = {
        **outside,
        "FORGEMQ_CONSOLE_KEY": KEY,
        "FORGEMQ_CONSOLE_TLS_CERTIFICATE_FILE": str(certificate),
        "FORGEMQ_CONSOLE_TLS_KEY_FILE": str(key),
    }
    return secured, ssl.create_default_context(cafile=str(ca.write(folder / "ca.pem")))


async def test_the_page_follows_a_run_for_who_has_its_key_and_shows_its_tokens(
    kafka_bootstrap, new_run_id, tmp_path
):
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
    blobs = BlobStore(begin.blobs, run=run_id)
    log = KafkaLog(connection, run=run_id, blobs=blobs, inline_bytes_max=300)
    await create_topics(log, begin.configuration)
    await write_start(connection, begin)
    environ = {
        **os.environ,
        "FORGEMQ_RUN": run_id,
        "FORGEMQ_KAFKA": kafka_bootstrap,
        "FORGEMQ_CONSOLE_PORT": str(port),
    }
    secured, trusted = await secured_off_loopback(environ, tmp_path)
    run = SyntheticRun(run=run_id).play(steps=1)
    await write(log, run, first=0)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "forgemq_console", env=secured
    )
    try:
        async with httpx.AsyncClient(
            base_url=f"https://127.0.0.1:{port}",
            auth=("anyone", KEY),
            verify=trusted,
            timeout=10,
        ) as http:
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
            places = [Place(FINISHED_COMPLETIONS.name, n) for n in range(2)]
            await log.trim(await log.end_positions(places))
            await asyncio.sleep(1.0)
            assert (await http.get("/api/state", auth=("", "no key"))).status_code == 401
            state = (await http.get("/api/state")).json()
            assert state["completions"] == len(list(run.of(FINISHED_COMPLETIONS)))
            assert (await http.get("/api/groups/g-3")).json()["episode"] is None
    finally:
        process.terminate()
        assert await process.wait() == 0
        await log.close()
