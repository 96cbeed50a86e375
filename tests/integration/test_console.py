"""The console as its own process on a real broker, seen through HTTP."""

import asyncio
import os
import shutil
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
from forgemq_contracts.run import EndedRun
from forgemq_contracts.topics import FINISHED_COMPLETIONS
from forgemq_launcher.records.run_topics import create_topics, write_end, write_start
from forgemq_settings.ports import free_port
from tests.certificates import authority
from tests.integration.synthetic_log import write
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


async def check_runs(http: httpx.AsyncClient, *, run_id: str) -> None:
    """With the key the run is in the list and can be opened from it; without, nothing is shown."""
    for address in ("/api/state", "/api/runs", f"/api/runs/{run_id}/compared"):
        assert (await http.get(address, auth=("", "no key"))).status_code == 401
    assert run_id in [row["run"] for row in (await http.get("/api/runs")).json()]
    opened = (await http.get(f"/runs/{run_id}/api/state")).json()
    assert (opened["run"], opened["steps_trained"]) == (run_id, 2)


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
            shown = ("steps_trained", "groups_admitted", "groups_open", "completions")
            expected = [2, 4, 0, len(list(run.of(FINISHED_COMPLETIONS)))]
            await state_when(http, lambda state: [state[name] for name in shown] == expected)
            group = (await http.get("/api/groups/g-3")).json()
            tokens = group["episode"]["turns"][0]["output"]
            assert [token["id"] for token in tokens] == [20, 30, 2]
            assert tokens[0]["logprob"] == -0.25
            places = [Place(FINISHED_COMPLETIONS.name, n) for n in range(2)]
            await log.trim(await log.end_positions(places))
            await asyncio.sleep(1.0)
            await check_runs(http, run_id=run_id)
            state = (await http.get("/api/state")).json()
            assert state["completions"] == len(list(run.of(FINISHED_COMPLETIONS)))
            assert (await http.get("/api/groups/g-3")).json()["episode"] is None
    finally:
        process.terminate()
        assert await process.wait() == 0
        await log.close()


@pytest.mark.long
async def test_a_run_that_is_over_is_opened_again_where_its_blobs_are_not(
    kafka_bootstrap, new_run_id, tmp_path
):
    """Scores lie in a folder that is gone, as on a machine that does not mount it."""
    run_id, port = new_run_id(), free_port()
    begin = msgspec.structs.replace(started(run=run_id), blobs=str(tmp_path / "blobs"))
    connection = KafkaConnection(bootstrap=kafka_bootstrap)
    blobs = BlobStore(begin.blobs, run=run_id)
    log = KafkaLog(connection, run=run_id, blobs=blobs, inline_bytes_max=600)
    await create_topics(log, begin.configuration)
    await write_start(connection, begin)
    await write(log, SyntheticRun(run=run_id).play(steps=3), first=0)
    await write_end(connection, EndedRun(run=run_id, reason="completed", ended_ms=61_000))
    await log.close()
    shutil.rmtree(tmp_path / "blobs")
    environ = {
        **os.environ,
        "FORGEMQ_RUN": run_id,
        "FORGEMQ_KAFKA": kafka_bootstrap,
        "FORGEMQ_CONSOLE_PORT": str(port),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "forgemq_console", env=environ
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            state = await state_when(http, lambda s: s["steps_trained"] == 3 and s["ended"])
            compared = (await http.get(f"/api/runs/{run_id}/compared")).json()
    finally:
        process.terminate()
        assert await process.wait() == 0
    assert (state["ended"], state["now_ms"], state["completions"]) == ("completed", 61_000, 24)
    assert (compared["report"]["steps"], compared["state"]["versions"]) == (3, [])
    assert "is the blob store of the run mounted" in compared["left_out"]
