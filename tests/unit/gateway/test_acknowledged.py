"""What an agent has an answer about is on the log: its rewards, and its completions."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from forgemq_bus.errors import LogError
from forgemq_bus.log import Emit
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from tests.unit.gateway.hindered_log import Hinder, HinderedLog
from tests.unit.gateway.scripted_lane import wall_ms
from tests.unit.gateway.world import configuration_of, running

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def hindered(hinder: Hinder) -> Callable[[], Any]:
    store = MemoryLog(run="r", clock_ms=wall_ms)
    return lambda: HinderedLog(store.open(), hinder)


class HeldDeliveries:
    """Lets every record of a delivery wait."""

    def __init__(self) -> None:
        self.held, self.released = asyncio.Event(), asyncio.Event()

    async def __call__(self, emit: Emit) -> None:
        if emit.topic == topics.DELIVERED_COMPLETIONS.name:
            self.held.set()
            await self.released.wait()


async def test_a_reward_that_could_not_be_written_is_written_by_the_next_request(
    model: Path,
) -> None:
    fails: list[bool] = [True]

    async def fail_once(emit: Emit) -> None:
        if emit.topic == topics.OPENED_EPISODES.name and b"rewards" in emit.value and fails:
            fails.pop()
            raise LogError("no room")

    async with running(hindered(fail_once), configuration_of(model), lambda _: "yes") as (world, _):
        claim = await world.episode()
        path = f"/v1/episodes/{claim['episode_id']}/rewards"
        reward = {"reward_id": "r", "name": "n", "value": 2.0}
        failed = await world.admin("POST", path, reward)
        repeated = await world.admin("POST", path, reward)
        opened = await world.records(topics.OPENED_EPISODES)
    assert (failed.status_code, repeated.status_code) == (503, 200)
    assert [reward.value for reward in opened[-1].rewards] == [2.0]


async def test_rewards_at_once_are_all_on_the_log_and_in_the_end_that_follows(model: Path) -> None:
    async def slowly(emit: Emit) -> None:
        if b"rewards" in emit.value:
            await asyncio.sleep(0.05)

    async with running(hindered(slowly), configuration_of(model), lambda _: "yes") as (world, _):
        claim = await world.episode()
        path = f"/v1/episodes/{claim['episode_id']}"
        answers = [
            asyncio.ensure_future(
                world.admin(
                    "POST", f"{path}/rewards", {"reward_id": f"r{n}", "name": "n", "value": n}
                )
            )
            for n in range(3)
        ]
        await asyncio.sleep(0.03)
        await world.admin("POST", f"{path}/finish", {"result": 1})
        told = {n for n, answer in enumerate(answers) if (await answer).status_code == 200}
        finished = (await world.records(topics.FINISHED_EPISODES))[0]
    assert told
    assert {int(reward.value) for reward in finished.rewards} == told


class HeldSecondAttempt:
    """Lets the record of a second attempt at the first episode wait, and then fail if asked to."""

    def __init__(self, *, fails: bool) -> None:
        self.held, self.released = asyncio.Event(), asyncio.Event()
        self._fails = fails

    async def __call__(self, emit: Emit) -> None:
        if emit.topic == topics.OPENED_EPISODES.name and b".0.1" in emit.value:
            self.held.set()
            await self.released.wait()
            if self._fails:
                raise LogError("no room")


@pytest.mark.slow
@pytest.mark.wall_clock
@pytest.mark.parametrize("fails", [False, True], ids=["taken", "not taken"])
async def test_an_end_that_comes_while_another_agent_takes_the_episode_waits_for_that(
    model: Path, *, fails: bool
) -> None:
    """The first agent was silent for a whole lease, and ends its episode at the same moment."""
    hold = HeldSecondAttempt(fails=fails)
    configuration = configuration_of(model, lease_s=0.4)
    async with running(hindered(hold), configuration, lambda _: "yes") as (world, _):
        group = await world.open_group()
        first = await world.claim(group)
        await world.claim(group)
        path = f"/v1/groups/{group}/claim"
        claiming = asyncio.ensure_future(world.admin("POST", path, {"wait_s": 5}))
        await hold.held.wait()
        path = f"/v1/episodes/{first['episode_id']}/finish"
        ending = asyncio.ensure_future(world.admin("POST", path, {"result": 1}))
        await asyncio.sleep(0.1)
        was_answered = ending.done()
        hold.released.set()
        ended, claimed = await ending, await claiming
        if not fails:
            path = f"/v1/episodes/{claimed.json()['episode_id']}/finish"
            assert (await world.admin("POST", path, {"result": 2})).status_code == 200
        finals = [each for each in await world.records(topics.FINISHED_EPISODES) if not each.index]
    assert not was_answered
    assert ended.status_code == (200 if fails else 409)
    assert [each.attempt for each in finals] == [0 if fails else 1]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_answer_ends_when_its_delivery_is_on_the_log(
    model: Path, *, is_stream: bool
) -> None:
    """The gateway dies while the broker holds the record back: the agent has no answer yet."""
    hold = HeldDeliveries()

    async def ask(client: openai.AsyncOpenAI) -> Any:
        answer = await client.chat.completions.create(
            model="policy", messages=HELLO, stream=is_stream
        )
        return [chunk async for chunk in answer] if is_stream else answer

    async with running(hindered(hold), configuration_of(model), lambda _: "yes") as (world, _):
        claim = await world.episode()
        asking = asyncio.ensure_future(ask(world.client(claim)))
        await hold.held.wait()
        await asyncio.sleep(0.05)
        was_answered = asking.done()
        restarting = asyncio.ensure_future(world.restart())
        await asyncio.sleep(0)  # The log is closed, and takes nothing of what is held.
        hold.released.set()
        await restarting
        with pytest.raises(openai.InternalServerError):  # Of its answer no byte was sent.
            await asking
        claim["base_url"] = f"{world.base_url}/v1"
        await ask(world.client(claim))
        path = f"/v1/episodes/{claim['episode_id']}/finish"
        await world.admin("POST", path, {"result": {"said": "yes"}})
        finished = (await world.records(topics.FINISHED_EPISODES))[0]
        sampled = await world.records(topics.FINISHED_COMPLETIONS)
    assert not was_answered
    assert len(sampled) == 1
    assert [entry.completion_id for entry in finished.manifest] == [sampled[0].request_id]


async def test_a_client_that_leaves_while_its_delivery_is_written_has_not_had_it(
    model: Path,
) -> None:
    hold = HeldDeliveries()

    async with running(hindered(hold), configuration_of(model), lambda _: "yes") as (world, _):
        claim = await world.episode()
        client = world.client(claim)
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.3).chat.completions.create(
                model="policy", messages=HELLO
            )
        assert hold.held.is_set()
        await asyncio.sleep(0.05)
        hold.released.set()
        records = await world.eventually(topics.DELIVERED_COMPLETIONS, 2)
        await world.restart()
        claim["base_url"] = f"{world.base_url}/v1"
        again = await world.client(claim).chat.completions.create(model="policy", messages=HELLO)
        sampled = await world.records(topics.FINISHED_COMPLETIONS)
    assert [record.is_withdrawn for record in records] == [False, True]
    assert [f"chatcmpl-{one.request_id}" for one in sampled] == [again.id]
