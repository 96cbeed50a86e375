"""What an old owner of a group has on its way never counts over what the new owner answers."""

import asyncio
from asyncio import create_task
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from forgemq_bus.log import Emit
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.partitions import group_partition
from tests.unit.gateway.hindered_log import HinderedLog
from tests.unit.gateway.scripted_lane import GROUP_PARTITIONS, wall_ms
from tests.unit.gateway.test_replicas import at, key_in, owners, said, settled
from tests.unit.gateway.world import ADMIN_KEY, World, configuration_of, plain_http, running


class HeldWrites:
    """Lets the first commit that has a record with these bytes wait."""

    def __init__(self) -> None:
        self.marked = b""
        self.held, self.released = asyncio.Event(), asyncio.Event()

    async def __call__(self, emit: Emit) -> None:
        if self.marked and self.marked in emit.value and not self.held.is_set():
            self.held.set()
            await self.released.wait()


@asynccontextmanager
async def one_gateway(model: Path) -> AsyncIterator[tuple[World, HeldWrites]]:
    log, writes = MemoryLog(run="r", clock_ms=wall_ms), HeldWrites()
    configuration = configuration_of(model)
    async with running(lambda: HinderedLog(log.open(), writes), configuration, lambda _: "yes") as (
        world,
        _,
    ):
        yield world, writes


async def claims(world: World) -> list[Any]:
    """A claim in each partition, as many as may wait for a slot."""
    keys = [key_in([number]) for number in range(GROUP_PARTITIONS)][:3]
    return [await world.claim(await world.open_group(key)) for key in keys]


async def moved(world: World, claimed: list[Any]) -> Any:
    """A claim that a second gateway takes over; it answers from now on."""
    await world.start_another()
    await settled(world)
    world.base_url, shares = world.gateways[-1].url, await owners(world)
    numbers = [group_partition(c["group_id"], partitions=GROUP_PARTITIONS) for c in claimed]
    return next(
        claim
        for claim, number in zip(claimed, numbers, strict=True)
        if shares[number] == world.base_url
    )


def asked(url: str, path: str, body: object) -> "asyncio.Task[Any]":
    """Ask this gateway, again while it says that the same request may succeed later."""

    async def ask() -> Any:
        async with plain_http() as client:
            headers = {"authorization": f"Bearer {ADMIN_KEY}"}
            while True:
                answer = await client.post(f"{url}{path}", json=body, headers=headers)
                if answer.status_code not in (429, 503):
                    assert answer.status_code == 200, answer.text
                    return answer.json()
                await asyncio.sleep(0.05)

    return create_task(ask())


@pytest.mark.slow
async def test_an_end_on_its_way_at_the_old_owner_counts_over_nothing_that_the_new_one_answers(
    model: Path,
) -> None:
    async with one_gateway(model) as (world, writes):
        first, claimed = world.base_url, await claims(world)
        writes.marked = b'"late end"'
        late = [
            asked(first, f"/v1/episodes/{c['episode_id']}/finish", {"result": "late end"})
            for c in claimed
        ]
        await writes.held.wait()
        claim = await moved(world, claimed)
        path = f"/v1/episodes/{claim['episode_id']}"
        assert await said(world, at(world.base_url, claim)) == "yes"
        reward = {"reward_id": "r1", "name": "x", "value": 1.0}
        assert (await world.admin("POST", f"{path}/rewards", reward)).status_code == 200
        writes.released.set()
        await asyncio.gather(*late)
        finals = await world.records(topics.FINISHED_EPISODES)
    found = [each for each in finals if each.episode_id == claim["episode_id"]]
    assert [(len(f.manifest), [r.reward_id for r in f.rewards]) for f in found] == [(1, ["r1"])]


async def test_a_reward_on_its_way_at_the_old_owner_replaces_none_that_the_new_one_promised(
    model: Path,
) -> None:
    async with one_gateway(model) as (world, writes):
        first, claimed = world.base_url, await claims(world)
        writes.marked = b"late reward"
        body = {"reward_id": "old", "name": "late reward", "value": 0.0}
        late = [asked(first, f"/v1/episodes/{c['episode_id']}/rewards", body) for c in claimed]
        await writes.held.wait()
        claim = await moved(world, claimed)
        path = f"/v1/episodes/{claim['episode_id']}"
        reward = {"reward_id": "new", "name": "x", "value": 1.0}
        assert (await world.admin("POST", f"{path}/rewards", reward)).status_code == 200
        writes.released.set()
        await asyncio.gather(*late)
        await world.kill()
        await asked(first, f"{path}/finish", {})
        finals = await world.records(topics.FINISHED_EPISODES)
    found = [each for each in finals if each.episode_id == claim["episode_id"]]
    assert [sorted(r.reward_id for r in each.rewards) for each in found] == [["new", "old"]]


@pytest.mark.slow
async def test_a_claim_on_its_way_at_the_old_owner_is_given_to_nobody_else(model: Path) -> None:
    async with one_gateway(model) as (world, writes):
        first = world.base_url
        groups = [await world.open_group(key_in([n])) for n in range(GROUP_PARTITIONS)][:3]
        writes.marked = b"key_sha256"
        claiming = [asked(first, f"/v1/groups/{group}/claim", {}) for group in groups]
        await writes.held.wait()
        group = (await moved(world, [{"group_id": group} for group in groups]))["group_id"]
        claim = await world.claim(group)
        writes.released.set()
        late = [each for each in await asyncio.gather(*claiming) if each["group_id"] == group]
        assert await said(world, at(first, claim)) == "yes"
        assert await said(world, at(first, late[0])) == "yes"
    assert claim["episode_id"] != late[0]["episode_id"]
