"""Limits of requests by key over HTTP: refusals in each protocol's shape, and floods."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from forgemq_gateway.settings import GatewaySettings
from tests.metered import Held, counted, metered
from tests.unit.gateway.scripted_lane import Asked, ScriptedLane
from tests.unit.gateway.test_chat import log_store
from tests.unit.gateway.world import SETTINGS, World, configuration_of, plain_http, running

CHAT = "/v1/chat/completions"
PATHS = (CHAT, "/v1/messages", "/v1/responses")


class Gated:
    """A gateway with few places, and how many requests its limits refused.

    Attributes:
        answers: The engine answers when it is set.
    """

    def __init__(self, held: Callable[[], Held]) -> None:
        self.answers = asyncio.Event()
        self._held = held

    async def script(self, asked: Asked) -> str:
        await self.answers.wait()
        return "yes"

    def enter(self, world: World, lane: ScriptedLane) -> "Gated":
        self.world, self.lane = world, lane
        return self

    async def settle(self) -> None:
        """Let everything happen that waits for nothing but the loop."""
        await asyncio.sleep(0.1)

    async def post(
        self, client: httpx.AsyncClient, claim: Any, *, text: str, path: str = CHAT
    ) -> httpx.Response:
        message = {"role": "user", "content": text}
        body = {"model": "m", "max_tokens": 8, "messages": [message], "input": [message]}
        body.pop("messages" if path == "/v1/responses" else "input")
        url = f"{self.world.base_url}{path}"
        return await client.post(url, json=body, headers={"x-api-key": claim["key"]})

    def refused(self) -> dict[str, int]:
        """Refused requests by limit."""
        return counted(self._held(), "gateway.refused", by="limit")


@asynccontextmanager
async def gated(model: Path, settings: GatewaySettings) -> AsyncIterator[Gated]:
    telemetry, held = metered("gateway")
    scene = Gated(held)
    async with running(
        log_store(), configuration_of(model), scene.script, settings=settings, telemetry=telemetry
    ) as (world, (lane,)):
        yield scene.enter(world, lane)


def limited(**limits: Any) -> GatewaySettings:
    return msgspec.structs.replace(SETTINGS, **limits)


@pytest.mark.parametrize("path", PATHS)
async def test_beyond_a_keys_limit_a_request_is_429_in_its_protocol_and_named(
    model: Path, path: str
) -> None:
    async with gated(model, limited(key_requests_max=1)) as scene, plain_http() as client:
        claim = await scene.world.episode()
        async with asyncio.TaskGroup() as tasks:
            served = tasks.create_task(scene.post(client, claim, text="a", path=path))
            await scene.settle()
            refused = await scene.post(client, claim, text="b", path=path)
            scene.answers.set()
        counted = scene.refused()
    assert (served.result().status_code, refused.status_code) == (200, 429)
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert "has 1 requests open" in refused.json()["error"]["message"]
    assert counted == {"key_requests": 1}


async def test_a_request_without_a_place_is_429_after_the_hold(model: Path) -> None:
    settings = limited(requests_max=1, lane_hold_s=2.0)
    async with gated(model, settings) as scene, plain_http(timeout_s=60) as client:
        claim = await scene.world.episode()
        async with asyncio.TaskGroup() as tasks:
            served = tasks.create_task(scene.post(client, claim, text="a"))
            await scene.settle()
            started_s = asyncio.get_running_loop().time()
            refused = await scene.post(client, claim, text="b")
            took_s = asyncio.get_running_loop().time() - started_s
            scene.answers.set()
        counted = scene.refused()
    assert (served.result().status_code, refused.status_code) == (200, 429)
    assert refused.headers["retry-after"] == "1"
    assert took_s >= 2.0
    assert counted == {"requests": 1}


async def test_a_request_is_served_when_a_place_becomes_free_and_one_beyond_the_queue_never(
    model: Path,
) -> None:
    settings = limited(requests_max=1, requests_waiting_max=1, lane_hold_s=600.0)
    async with gated(model, settings) as scene, plain_http(timeout_s=60) as client:
        claim = await scene.world.episode()
        async with asyncio.TaskGroup() as tasks:
            served = []
            for text in "ab":
                served.append(tasks.create_task(scene.post(client, claim, text=text)))
                await scene.settle()
            refused = await scene.post(client, claim, text="c")
            scene.answers.set()
    assert [each.result().status_code for each in served] == [200, 200]
    assert refused.status_code == 429


async def test_a_key_over_its_rate_is_429_and_another_key_is_not(model: Path) -> None:
    async with gated(model, limited(key_requests_per_s_max=0.01)) as scene, plain_http() as client:
        scene.answers.set()
        group = await scene.world.open_group()
        first, other = [await scene.world.claim(group) for _ in range(2)]
        assert (await scene.post(client, first, text="a")).status_code == 200
        refused = await scene.post(client, first, text="b")
        assert (await scene.post(client, other, text="a")).status_code == 200
        counted = scene.refused()
    assert refused.status_code == 429
    assert 10 <= int(refused.headers["retry-after"]) <= 99
    assert counted == {"key_rate": 1}


async def test_another_keys_turn_is_next_however_many_a_flooding_key_has_waiting(
    model: Path,
) -> None:
    """The flood has both places and 18 more wait: in one queue the other would be the 21st."""
    settings = limited(requests_max=2, requests_waiting_max=100, lane_hold_s=600.0)
    async with gated(model, settings) as scene, plain_http(timeout_s=60) as client:
        group = await scene.world.open_group()
        flooder, other = [await scene.world.claim(group) for _ in range(2)]
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(scene.post(client, flooder, text=f"flood {number}"))
                for number in range(20)
            ]
            await scene.settle()
            asked.append(tasks.create_task(scene.post(client, other, text="hello")))
            await scene.settle()
            scene.answers.set()
        order = [seen.record.episode_id for seen in scene.lane.seen]
    assert {each.result().status_code for each in asked} == {200}
    assert order.index(other["episode_id"]) <= 3


async def test_a_flood_that_fills_the_queue_is_refused_for_another_key(model: Path) -> None:
    settings = limited(requests_max=1, requests_waiting_max=3, lane_hold_s=600.0)
    async with gated(model, settings) as scene, plain_http(timeout_s=60) as client:
        group = await scene.world.open_group()
        flooder, other = [await scene.world.claim(group) for _ in range(2)]
        async with asyncio.TaskGroup() as tasks:
            flood = []
            for number in range(4):
                flood.append(tasks.create_task(scene.post(client, flooder, text=f"{number}")))
                await scene.settle()
            asked = tasks.create_task(scene.post(client, other, text="hello"))
            await scene.settle()
            newest = await flood[-1]
            scene.answers.set()
    assert newest.status_code == 429
    assert [each.result().status_code for each in (*flood[:3], asked)] == [200] * 4


async def test_a_body_over_the_limit_is_413_and_named(model: Path) -> None:
    async with gated(model, limited(body_bytes_max=1000)) as scene, plain_http() as client:
        claim = await scene.world.episode()
        answer = await scene.post(client, claim, text="a" * 2000)
        counted = scene.refused()
    assert answer.status_code == 413
    assert counted == {"body_bytes": 1}
