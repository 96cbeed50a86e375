"""Gateway processes of one run on the real broker: several, killed, and started again."""

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from forgemq_contracts import topics
from forgemq_launcher.upkeep.machine import listening_socket
from tests.integration.gateway_process import GatewayProcess, on_broker
from tests.integration.test_gateway import HELLO
from tests.unit.gateway.scripted_lane import GROUP_PARTITIONS, Asked
from tests.unit.gateway.test_replicas import key_in
from tests.unit.gateway.world import ADMIN_KEY, World, configuration_of
from tests.unit.rendering.folders import write_model_folder

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(180)]

RESTART_S_MAX = 20.0
"""Seconds from the kill to `serving` on a busy machine; the process itself starts in some 3 s. A
broker lets a dead transaction last 60 s: a restart that waited for its end would be seen."""

STANDS_STILL_S = 6.0
"""Twice as long as a gateway may be silent."""


async def owners(world: World) -> dict[int, str]:
    """Who owns each partition."""
    records = await world.records(topics.OWNED_RUNS)
    return {number: each.url for each in records[-1].owners for number in each.partitions}


async def test_gateways_come_and_are_killed_and_no_agent_loses_a_turn(
    kafka_bootstrap: str, new_run_id: Callable[[], str], tmp_path: Path
) -> None:
    """Turns wait at the first gateway while a second one comes, and at both while that one dies."""
    release = asyncio.Event()

    async def answer(_: Asked) -> str:
        await release.wait()
        return "yes"

    configuration = configuration_of(write_model_folder(tmp_path / "model"), run=new_run_id())
    first, second = (listening_socket("127.0.0.1", wanted=0) for _ in range(2))
    where: dict[str, Any] = {"bootstrap": kafka_bootstrap, "blobs": str(tmp_path / "blobs")}
    async with on_broker(configuration, answer, listener=first, **where) as (world, lane, older):
        urls = [f"http://127.0.0.1:{each.getsockname()[1]}" for each in (first, second)]
        keys = [key_in([number], run=configuration.run) for number in range(GROUP_PARTITIONS)]
        claims = [await world.claim(await world.open_group(key)) for key in keys]
        clients = [world.client(claim, retries=2) for claim in claims]
        asking = [
            asyncio.create_task(client.chat.completions.create(model="m", messages=HELLO))
            for client in clients
        ]
        await lane.has_seen(len(claims))
        newer = GatewayProcess(older.environ, listener=second)
        world.base_url = urls[1]
        await newer.start(world)
        shared = set((await owners(world)).values())
        assert await newer.end(signal.SIGKILL) == -signal.SIGKILL
        second.close()
        release.set()
        told = [await each for each in asking]
        again = [
            await client.chat.completions.create(
                model="m", messages=[*HELLO, answer.choices[0].message, *HELLO]
            )
            for client, answer in zip(clients, told, strict=True)
        ]
        finals = set((await owners(world)).values())
        cancelled = await world.records(topics.CANCELLED_COMPLETIONS)
    first.close()
    assert (shared, finals) == (set(urls), {urls[0]})
    asked = {f"chatcmpl-{each.record.request_id}" for each in lane.seen}
    assert {answer.id for answer in (*told, *again)} == asked
    assert len(asked) == 2 * GROUP_PARTITIONS
    assert cancelled == []


async def test_a_gateway_that_stops_refuses_who_waits_with_503_and_the_other_one_answers_them(
    kafka_bootstrap: str, new_run_id: Callable[[], str], tmp_path: Path
) -> None:
    """A turn goes on at the other one meanwhile, for longer than the first one may take to end."""
    release = asyncio.Event()

    async def answer(_: Asked) -> str:
        await release.wait()
        return "yes"

    configuration = configuration_of(write_model_folder(tmp_path / "model"), run=new_run_id())
    first, second = (listening_socket("127.0.0.1", wanted=0) for _ in range(2))
    where: dict[str, Any] = {"bootstrap": kafka_bootstrap, "blobs": str(tmp_path / "blobs")}
    async with on_broker(configuration, answer, listener=first, **where) as (world, lane, older):
        claim, url = await world.episode(), "/v1/chat/completions"
        body = {"model": "m", "messages": HELLO}
        asking = asyncio.create_task(world.admin("POST", url, body, key=claim["key"]))
        await lane.has_seen(1)
        newer = GatewayProcess(older.environ, listener=second)
        world.base_url = f"http://127.0.0.1:{second.getsockname()[1]}"
        await newer.start(world)
        status = await older.end(signal.SIGTERM)
        refused = await asking
        release.set()
        answered = await world.admin("POST", url, body, key=claim["key"])
        await newer.end(signal.SIGTERM)
    for listener in (first, second):
        listener.close()
    assert status == 0
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert answered.json()["choices"][0]["message"]["content"] == "yes"


async def test_a_killed_owner_that_is_started_at_once_serves_at_once(
    kafka_bootstrap: str, new_run_id: Callable[[], str], tmp_path: Path
) -> None:
    """No lease and no transaction of the killed one holds the new one up."""
    configuration = configuration_of(write_model_folder(tmp_path / "model"), run=new_run_id())
    listener = listening_socket("127.0.0.1", wanted=0)
    where: dict[str, Any] = {"bootstrap": kafka_bootstrap, "blobs": str(tmp_path / "blobs")}
    async with on_broker(configuration, lambda _: "yes", listener=listener, **where) as scene:
        world, _, process = scene
        claim = await world.episode()
        for _ in range(2):
            assert await process.end(signal.SIGKILL) == -signal.SIGKILL
            killed_s = time.monotonic()
            await process.start(world)
            assert time.monotonic() - killed_s < RESTART_S_MAX
        client = world.client(claim)
        answer = await client.chat.completions.create(model="m", messages=HELLO)
        changes = [record.owners[0] for record in await world.records(topics.OWNED_RUNS)]
    listener.close()
    assert answer.choices[0].message.content == "yes"
    # What each gateway wrote first, when it took over what the one before had.
    first, second, third = [
        next(owner for owner in changes if owner.gateway == gateway)
        for gateway in dict.fromkeys(owner.gateway for owner in changes)
    ]
    assert first.unfenced == ()
    assert first.gateway in second.unfenced
    assert second.gateway in third.unfenced


class Agent:
    """Plays one episode at two gateways: it asks the other one if it hears nothing for 2 s."""

    def __init__(self, claim: Any, urls: list[str]) -> None:
        self.claim = claim
        self.answered: list[str] = []
        self.rewarded: list[str] = []
        self._urls = urls

    async def play(self, turns: int) -> None:
        messages: list[Any] = [*HELLO]
        for turn in range(turns):
            answer = await self._asked(
                "/v1/chat/completions", {"messages": messages}, key=self.claim["key"]
            )
            self.answered.append(answer["id"].removeprefix("chatcmpl-"))
            messages = [*messages, answer["choices"][0]["message"], *HELLO]
            reward = {"reward_id": f"r{turn}", "name": "x", "value": 1.0}
            path = f"/v1/episodes/{self.claim['episode_id']}"
            await self._asked(f"{path}/rewards", reward, key=ADMIN_KEY)
            self.rewarded.append(f"r{turn}")
            await asyncio.sleep(0.3)
        await self._asked(f"{path}/finish", {}, key=ADMIN_KEY)

    async def _asked(self, path: str, body: Any, *, key: str) -> Any:
        """The answer of the first gateway that gives one."""
        for retry in range(40):
            headers = {"authorization": f"Bearer {key}", "x-stainless-retry-count": str(retry)}
            try:
                async with httpx.AsyncClient(timeout=2.0) as client:
                    url = self._urls[retry % len(self._urls)]
                    answer = await client.post(f"{url}{path}", json=body, headers=headers)
            except httpx.TransportError:
                continue
            if answer.status_code == 200:
                return answer.json()
            assert answer.status_code in (429, 503), answer.text
            await asyncio.sleep(0.2)
        raise AssertionError(f"{path}: no gateway answers")


async def test_gateways_that_stand_still_for_a_while_lose_no_turn_and_double_none(
    kafka_bootstrap: str, new_run_id: Callable[[], str], tmp_path: Path
) -> None:
    """Each stands still for longer than its silence is borne, and goes on as if nothing was."""
    configuration = configuration_of(write_model_folder(tmp_path / "model"), run=new_run_id())
    first, second = (listening_socket("127.0.0.1", wanted=0) for _ in range(2))
    where: dict[str, Any] = {"bootstrap": kafka_bootstrap, "blobs": str(tmp_path / "blobs")}
    async with on_broker(configuration, lambda _: "yes", listener=first, **where) as scene:
        world, _, older = scene
        urls = [f"http://127.0.0.1:{each.getsockname()[1]}" for each in (first, second)]
        newer = GatewayProcess(older.environ, listener=second)
        keys = [key_in([number], run=configuration.run) for number in range(GROUP_PARTITIONS)]
        groups = [await world.open_group(key) for key in keys]
        claims = [await world.claim(group) for group in groups for _ in range(2)]
        world.base_url = urls[1]
        await newer.start(world)
        agents = [Agent(claim, urls[:: 1 if n % 2 else -1]) for n, claim in enumerate(claims)]
        playing = [asyncio.create_task(agent.play(12)) for agent in agents]
        for gateway in (newer, older):
            await asyncio.sleep(0.7)
            gateway.send(signal.SIGSTOP)
            await asyncio.sleep(STANDS_STILL_S)
            gateway.send(signal.SIGCONT)
        await asyncio.gather(*playing)
        finals = await world.records(topics.FINISHED_EPISODES)
        finished = await world.records(topics.FINISHED_COMPLETIONS)
        assert await newer.end(signal.SIGTERM) == 0
    first.close()
    second.close()
    known = {each.episode_id: each for each in reversed(finals)}
    for agent in agents:
        final = known[agent.claim["episode_id"]]
        counted = [entry.completion_id for entry in final.manifest]
        assert sorted(counted) == sorted(agent.answered)
        assert sorted(each.reward_id for each in final.rewards) == sorted(agent.rewarded)
    assert len(known) == len(agents)
    sampled = {record.request_id for record in finished}
    assert sampled == {turn for agent in agents for turn in agent.answered}
