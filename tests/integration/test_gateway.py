"""The gateway as its own process on the real broker, killed in the middle of a turn."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from forgemq_contracts import topics
from forgemq_launcher.upkeep.machine import listening_socket
from tests.integration.gateway_process import on_broker
from tests.unit.gateway.scripted_lane import Asked, contexts_of
from tests.unit.gateway.world import configuration_of
from tests.unit.rendering.folders import write_model_folder

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

AWAY_S = 3.0
"""The default pauses of OpenAI's client are 0.5 s and 1 s; its third refusal ends the agent."""
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


async def test_a_client_with_default_retries_survives_the_gateways_sigkill_with_the_same_request(
    kafka_bootstrap: str, new_run_id: Callable[[], str], tmp_path: Path
) -> None:
    """A turn is in flight when the gateway dies; the client's first retry waits and is answered.

    The gateway is away for longer than both of the client's pauses together, 1.5 s.
    """
    release = asyncio.Event()

    async def script(asked: Asked) -> str:
        if "second" in asked.text:
            await release.wait()
        return "yes"

    configuration = configuration_of(
        write_model_folder(tmp_path / "model"), run=new_run_id(), context_tokens_max=20_000
    )
    listener = listening_socket("127.0.0.1", wanted=0)
    async with on_broker(
        configuration,
        script,
        bootstrap=kafka_bootstrap,
        blobs=str(tmp_path / "blobs"),
        listener=listener,
    ) as (world, lane, process):
        claim = await world.episode()
        client = world.client(claim, retries=openai.DEFAULT_MAX_RETRIES)
        await client.chat.completions.create(model="m", messages=HELLO)
        history: list[Any] = [
            *HELLO,
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "second " + "long " * 2000},
        ]
        asking = asyncio.ensure_future(client.chat.completions.create(model="m", messages=history))
        await lane.has_seen(2)
        assert await process.end(signal.SIGKILL) == -signal.SIGKILL
        await asyncio.sleep(AWAY_S)
        await process.start(world)
        release.set()
        answer = await asking
        await world.admin("POST", f"/v1/episodes/{claim['episode_id']}/finish", {})
        finished = await world.records(topics.FINISHED_COMPLETIONS)
        (ended,) = await world.records(topics.FINISHED_EPISODES)
    listener.close()
    assert answer.id == f"chatcmpl-{lane.seen[1].record.request_id}"
    assert {asked.record.request_id for asked in lane.seen[1:]} == {lane.seen[1].record.request_id}
    whole = contexts_of(finished)
    first, second = finished[0], finished[1]
    assert second.parent_id == first.request_id
    tokens = whole[first.request_id]
    assert whole[second.request_id][: len(tokens)] == tokens
    assert [entry.completion_id for entry in ended.manifest] == [
        first.request_id,
        second.request_id,
    ]
    assert [finished[entry.offset].request_id for entry in ended.manifest] == [
        entry.completion_id for entry in ended.manifest
    ]
