"""After kill -9 a gateway reads from the log what was answered, and what is still waited for."""

import asyncio
from pathlib import Path

from forgemq_contracts import topics
from tests.unit.gateway.scripted_lane import Asked
from tests.unit.gateway.test_episodes import HELLO, log_store, yes
from tests.unit.gateway.world import configuration_of, running


async def test_after_kill_9_everything_is_as_before(model: Path) -> None:
    """Same key, same history, same request ids; the next turn extends the sampled tokens."""
    async with running(log_store(), configuration_of(model), yes) as (world, lanes):
        claim = await world.episode()
        path = f"/v1/episodes/{claim['episode_id']}"
        await world.client(claim).chat.completions.create(model="m", messages=HELLO)
        await world.admin("POST", f"{path}/rewards", {"reward_id": "r", "name": "n", "value": 2.0})
        await world.restart()
        moved = {**claim, "base_url": f"{world.base_url}/v1"}
        view = (await world.admin("GET", f"/v1/groups/{claim['group_id']}")).json()
        await world.client(moved).chat.completions.create(
            model="m",
            messages=[
                *HELLO,
                {"role": "assistant", "content": "yes"},
                {"role": "user", "content": "more"},
            ],
        )
        await world.admin("POST", f"{path}/finish", {})
        first, second = await world.records(topics.FINISHED_COMPLETIONS)
        (ended,) = await world.records(topics.FINISHED_EPISODES)
    assert (view["state"], view["open"]) == ("admitted", 1)
    assert second.parent_id == first.request_id
    assert not second.turn.is_fork
    assert second.turn.sequence == 1
    assert lanes[0].seen[1].record.is_delta
    assert [entry.completion_id for entry in ended.manifest] == [
        first.request_id,
        second.request_id,
    ]
    assert [reward.value for reward in ended.rewards] == [2.0]


async def test_a_retry_after_kill_9_waits_for_the_request_that_is_in_flight(model: Path) -> None:
    release = asyncio.Event()

    async def wait(asked: Asked) -> str:
        await release.wait()
        return "yes"

    async with running(log_store(), configuration_of(model), wait) as (world, lanes):
        claim = await world.episode()
        asking = asyncio.ensure_future(
            world.client(claim).chat.completions.create(model="m", messages=HELLO)
        )
        await lanes[0].has_seen(1)
        await world.restart()
        await asyncio.wait([asking])
        moved = {**claim, "base_url": f"{world.base_url}/v1"}
        again = asyncio.ensure_future(
            world.client(moved).chat.completions.create(model="m", messages=HELLO)
        )
        await asyncio.sleep(0.3)
        release.set()
        answer = await again
    assert asking.exception() is not None
    assert len(lanes[0].seen) == 1
    assert answer.id == f"chatcmpl-{lanes[0].seen[0].record.request_id}"


async def test_a_retry_after_kill_9_is_served_from_the_log_if_the_answer_exists(
    model: Path,
) -> None:
    async with running(log_store(), configuration_of(model), yes) as (world, lanes):
        claim = await world.episode()
        asking = asyncio.ensure_future(
            world.client(claim).chat.completions.create(model="m", messages=HELLO)
        )
        await lanes[0].has_seen(1)
        await world.kill()  # Before the lane's answer is read back.
        await asyncio.wait([asking])
        await world.eventually(topics.FINISHED_COMPLETIONS, 1)
        await world.start_another()
        moved = {**claim, "base_url": f"{world.base_url}/v1"}
        answer = await world.client(moved).chat.completions.create(model="m", messages=HELLO)
        finished = await world.records(topics.FINISHED_COMPLETIONS)
    assert [f"chatcmpl-{record.request_id}" for record in finished] == [answer.id]
