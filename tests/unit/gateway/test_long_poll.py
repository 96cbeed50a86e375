"""A wait for a group misses no change, and ends when the gateway does."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forgemq_bus.errors import LogError
from forgemq_bus.log import Emit
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from tests.unit.gateway.hindered_log import HinderedLog
from tests.unit.gateway.scripted_lane import Asked, wall_ms
from tests.unit.gateway.world import configuration_of, running

GROUP: dict[str, Any] = {"domain": "shop", "idempotency_key": "k", "task": {}}


def log_store() -> Callable[[], MemoryLog]:
    return MemoryLog(run="r", clock_ms=wall_ms).open


def yes(_: Asked) -> str:
    return "yes"


async def test_an_admission_between_two_calls_is_answered_at_once(model: Path) -> None:
    """The caller names the state it knows, so a change before the call counts as well."""
    async with running(log_store(), configuration_of(model), yes) as (world, _):
        group = await world.open_group()
        path = f"/v1/groups/{group}?wait_s=20&state="
        await world.claim(group)  # Returns once the group is admitted.
        async with asyncio.timeout(5):
            admitted = await world.admin("GET", f"{path}requested")
            waiting = asyncio.ensure_future(world.admin("GET", f"{path}admitted"))
            await asyncio.sleep(0.2)
            is_waiting = not waiting.done()
            await world.retire(group)
            retired = await waiting
            over = [await world.admin("GET", f"{path}{state}") for state in ("admitted", "retired")]
        refused = await world.admin("GET", f"{path}asleep")
    assert is_waiting
    assert admitted.json()["state"] == "admitted"
    assert [answer.json()["state"] for answer in (retired, *over)] == ["retired"] * 3
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "state")


async def test_a_gateway_that_ends_answers_long_polls_at_once(model: Path) -> None:
    async with running(log_store(), configuration_of(model), yes) as (world, _):
        group = (await world.admin("POST", "/v1/groups", GROUP)).json()["group_id"]
        waiting = asyncio.ensure_future(world.admin("GET", f"/v1/groups/{group}?wait_s=20"))
        await asyncio.sleep(0.2)
        async with asyncio.timeout(3):
            await world.stop()
            answer = await waiting
    assert (answer.status_code, answer.json()["state"]) == (200, "requested")


async def test_a_gateway_that_ends_answers_waiting_claims_at_once(model: Path) -> None:
    async with running(log_store(), configuration_of(model), yes) as (world, _):
        group = await world.open_group()
        await world.claim(group)
        await world.claim(group)
        path = f"/v1/groups/{group}/claim"
        waiting = asyncio.ensure_future(world.admin("POST", path, {"wait_s": 20}))
        await asyncio.sleep(0.2)
        is_waiting = not waiting.done()
        async with asyncio.timeout(3):
            await world.stop()
            answer = await waiting
    assert is_waiting
    assert answer.status_code == 204


async def test_an_episode_whose_claim_could_not_be_written_goes_to_the_next_that_waits(
    model: Path,
) -> None:
    written, may_fail = asyncio.Event(), asyncio.Event()

    async def fail_second(emit: Emit) -> None:
        is_second = emit.topic == topics.OPENED_EPISODES.name and b".1.0" in emit.key
        if is_second and not may_fail.is_set():
            written.set()
            await may_fail.wait()
            raise LogError("no room")

    store = log_store()
    async with running(lambda: HinderedLog(store(), fail_second), configuration_of(model), yes) as (
        world,
        _,
    ):
        group = await world.open_group()
        await world.claim(group)
        path = f"/v1/groups/{group}/claim"
        failing = asyncio.ensure_future(world.admin("POST", path, {"wait_s": 20}))
        await written.wait()
        waiting = asyncio.ensure_future(world.admin("POST", path, {"wait_s": 20}))
        await asyncio.sleep(0.2)
        may_fail.set()
        async with asyncio.timeout(5):
            answers = [(await each).status_code for each in (failing, waiting)]
    assert answers == [503, 200]


async def test_no_episode_is_opened_for_an_agent_that_left_while_it_waited(model: Path) -> None:
    async with running(log_store(), configuration_of(model), yes) as (world, _):
        group = (await world.admin("POST", "/v1/groups", GROUP)).json()["group_id"]
        waiting = [asyncio.create_task(world.claim(group, wait_s=20)) for _ in range(2)]
        await asyncio.sleep(0.2)
        for agent in waiting:
            agent.cancel()
        await asyncio.wait(waiting)
        await world.admit(group)
        claims = [await world.claim(group) for _ in range(2)]
        opened = await world.records(topics.OPENED_EPISODES)
    assert sorted((claim["index"], claim["attempt"]) for claim in claims) == [(0, 0), (1, 0)]
    assert len(opened) == 2
