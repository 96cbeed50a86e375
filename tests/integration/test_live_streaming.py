"""Streams of a live queue over the real broker, whose gateway is killed while they are open."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import pytest
from msgspec import Raw
from openai import AsyncOpenAI

from forgemq_agents.gateway_client import GatewayClient
from forgemq_agents.requests import JsonRequests, Retry
from forgemq_contracts import topics
from forgemq_contracts.admin import Claim, FinishRequest, GroupRequest
from forgemq_contracts.arrays import unpack_ids
from forgemq_rendering import Rendering
from tests.integration.launched_run import DIALOGUE, ROOT, LaunchedRun
from tests.integration.run_log import records_in
from tests.integration.stand_in import stand_in_engine

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

TURN_S = 4.0
"""A stream has its first text after less than a second, and is open for seconds when it breaks."""
TOKENS = 24
LIVE = (
    'queues.0.agent=""',
    'queues.0.task_source=""',
    'queues.0.stream="live"',
    "evaluation.tasks=0",
    "trainer.steps=1",
    # The group is alone: a step of two groups waits for another one, and the run stays open.
    "episodes.lease_s=60.0",
)
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


class Reader:
    """Streams one turn of an episode, twice if the first stream breaks."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.pieces: list[list[str]] = []
        self.broke = False

    async def read(self) -> None:
        async with AsyncOpenAI(base_url=self.claim.base_url, api_key=self.claim.key) as client:
            try:
                await self._stream(client)
            except (openai.APIError, httpx.HTTPError):
                self.broke = True
                await self._stream(client)

    async def _stream(self, client: AsyncOpenAI) -> None:
        self.pieces.append([])
        stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
        async for chunk in stream:
            if chunk.choices and (text := chunk.choices[0].delta.content):
                self.pieces[-1].append(text)


async def play(run: LaunchedRun) -> list[Reader]:
    """Stream the turns of a group, and kill the gateway when each has some of its text."""
    said = run.wait_for_line(r"export GATEWAY=(\S+) ADMIN_KEY=\$\(head -n1 (\S+)\)", within_s=90)
    key = await asyncio.to_thread(Path(said[2]).read_text)
    async with aiohttp.ClientSession() as http:
        requests = JsonRequests(http, retry=Retry(deadline_s=60.0))
        gateway = GatewayClient(requests, url=said[1], admin_key=key)
        group = await gateway.request_group(
            GroupRequest(domain="dialogue", idempotency_key="live/0", task=Raw(b"{}"))
        )
        while group.state == "requested":
            group = await gateway.read_group(group, wait_s=5)
        readers = []
        while claim := await gateway.claim(group.group_id):
            readers.append(Reader(claim))
        async with asyncio.TaskGroup() as tasks:
            for reader in readers:
                tasks.create_task(reader.read())
            while not all(any(reader.pieces) for reader in readers):  # noqa: ASYNC110 - over HTTP
                await asyncio.sleep(0.02)
            os.kill(run.pid_of("gateway", within_s=30), signal.SIGKILL)
        for reader in readers:
            await gateway.finish(reader.claim.episode_id, FinishRequest())
    return readers


def test_a_live_stream_that_a_killed_gateway_breaks_is_asked_for_again_and_recorded_once(
    kafka_bootstrap, new_run_id, tmp_path
):
    run_id = new_run_id()
    with stand_in_engine(latency_s=TURN_S, tokens=TOKENS) as engine_url:
        run = LaunchedRun(
            tmp_path, {"FORGEMQ_KAFKA": kafka_bootstrap, "FORGEMQ_ENGINE_URL": engine_url}
        )
        try:
            run.start(DIALOGUE, f"run={run_id}", *LIVE)
            readers = asyncio.run(play(run))
            run.interrupt()
            run.wait_for_end(within_s=60)
        finally:
            run.close()
    rendering = Rendering.load(str(ROOT / "deploy/demo/model"))

    def read(topic: topics.Topic) -> list[Any]:
        return records_in(kafka_bootstrap, topic, run=run_id, blobs=str(run.blobs(run_id)))

    finished = {record.episode_id: record for record in read(topics.FINISHED_COMPLETIONS)}
    assert len(finished) == len(read(topics.FINISHED_COMPLETIONS)) == len(readers) == 4
    delivered = [record.request_id for record in read(topics.DELIVERED_COMPLETIONS)]
    assert sorted(delivered) == sorted(record.request_id for record in finished.values())
    assert len(read(topics.SAMPLED_CHUNKS)) >= len(readers)
    for reader in readers:
        record = finished[reader.claim.episode_id]
        whole = rendering.parse(unpack_ids(record.output), completion_id="c").content
        first, second = ("".join(pieces) for pieces in reader.pieces)
        assert reader.broke
        assert second == whole
        # What had left is the beginning of what is recorded: the engine was not asked again.
        assert whole.startswith(first)
        assert len(first) < len(whole)
