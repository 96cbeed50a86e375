"""Several gateways of one run: any of them answers any request, and groups move between them."""

import asyncio
import itertools
from asyncio import create_task
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.partitions import group_id, group_partition
from forgemq_gateway.core.keys import AdminKeys
from forgemq_gateway.forwarding import OWNER_HEADER
from tests.unit.gateway.scripted_lane import GROUP_PARTITIONS, Asked, ScriptedLane, wall_ms
from tests.unit.gateway.world import (
    ADMIN_KEY,
    World,
    configuration_of,
    plain_http,
    running,
)

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
GROUPS = 3
"""As many as may wait for a slot."""


def store() -> Callable[[], MemoryLog]:
    return MemoryLog(run="r", clock_ms=wall_ms).open


@asynccontextmanager
async def gateways(
    model: Path, script: Callable[[Asked], Any] = lambda _: "yes", *, count: int = 2
) -> AsyncIterator[tuple[World, ScriptedLane]]:
    async with running(store(), configuration_of(model), script) as (world, (lane,)):
        for _ in range(count - 1):
            await world.start_another()
        await settled(world)
        yield world, lane


async def owners(world: World) -> dict[int, str]:
    """Who owns each partition, by the newest record."""
    records = await world.records(topics.OWNED_RUNS)
    return {number: each.url for each in records[-1].owners for number in each.partitions}


async def settled(world: World) -> None:
    """Wait until every gateway has its share."""
    there = {gateway.url for gateway in world.gateways}
    for _ in range(400):
        shares = list((await owners(world)).values())
        counts = [shares.count(url) for url in there]
        if sum(counts) == GROUP_PARTITIONS and max(counts) - min(counts) <= 1:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"not shared: {await owners(world)}")


def at(url: str, claim: Any) -> Any:
    return {**claim, "base_url": f"{url}/v1"}


async def said(world: World, claim: Any, *, retries: int = 0, stream: bool = False) -> str:
    client = world.client(claim, retries=retries)
    if not stream:
        answer = await client.chat.completions.create(model="m", messages=HELLO)
        return str(answer.choices[0].message.content)
    chunks = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


def key_in(numbers: Collection[int], *, run: str = "r") -> str:
    """Key of a group in one of these partitions."""
    for key in (f"k{number}" for number in itertools.count()):
        group = group_id(run=run, domain="shop", idempotency_key=key)
        if group_partition(group, partitions=GROUP_PARTITIONS) in numbers:
            return key
    raise AssertionError


def sealed(number: int) -> str:
    """What a gateway says when it sends a request on by this change of owners."""
    seals = AdminKeys((ADMIN_KEY,), run="r").seals_of(str(number))
    return " ".join((str(number), *seals))


def key_of(url: str, shares: dict[int, str]) -> str:
    """Key of a group that the gateway at this address owns."""
    return key_in([number for number, each in shares.items() if each == url])


async def test_every_gateway_answers_for_every_group(model: Path) -> None:
    async with gateways(model) as (world, _):
        urls = [gateway.url for gateway in world.gateways]
        shares = await owners(world)
        answers = []
        for owner in urls:
            key = key_of(owner, shares)
            for asked in urls:
                world.base_url = asked
                claim = await world.claim(await world.open_group(key))
                answers.append(await said(world, at(asked, claim)))
                path = f"/v1/episodes/{claim['episode_id']}"
                assert (await world.admin("POST", f"{path}/heartbeat")).status_code == 200
                assert (await world.admin("POST", f"{path}/finish", {})).status_code == 200
        finished = await world.records(topics.FINISHED_EPISODES)
    assert sorted(set(shares.values())) == sorted(urls)
    assert answers == ["yes"] * 4
    assert sorted(len(final.manifest) for final in finished) == [1] * 4


@pytest.mark.slow
async def test_a_stream_passes_through_another_gateway_as_it_is(model: Path) -> None:
    async with gateways(model) as (world, _):
        (first, second), shares = [g.url for g in world.gateways], await owners(world)
        world.base_url = first
        claim = await world.claim(await world.open_group(key_of(first, shares)))
        assert await said(world, at(second, claim), stream=True) == "yes"
        body = {"model": "m", "messages": HELLO, "stream": True}
        texts = []
        for url in (first, second):
            async with plain_http() as client:
                key = {"authorization": f"Bearer {claim['key']}"}
                answer = await client.post(f"{url}/v1/chat/completions", json=body, headers=key)
                texts.append((answer.status_code, answer.headers["content-type"]))
                refused = await client.post(f"{url}/v1/chat/completions", json={}, headers=key)
                texts.append((refused.status_code, refused.json()["error"]["param"]))
    assert texts[:2] == texts[2:]
    assert texts[0] == (200, "text/event-stream; charset=utf-8")


async def test_a_group_that_two_gateways_are_asked_for_is_one(model: Path) -> None:
    async with gateways(model) as (world, _):
        bodies = [{"domain": "shop", "idempotency_key": "k1", "task": {"n": n}} for n in (1, 2)]
        answers = []
        for gateway, body in zip(world.gateways, bodies, strict=True):
            world.base_url = gateway.url
            answers.append(await world.admin("POST", "/v1/groups", body))
        requested = await world.records(topics.REQUESTED_GROUPS)
    assert [answer.status_code for answer in answers] == [200, 409]
    assert len(requested) == 1


async def test_clients_that_wait_while_their_group_moves_are_answered_by_its_new_owner(
    model: Path,
) -> None:
    """A whole answer, and a stream whose head the client has: neither needs a retry."""
    release = asyncio.Event()

    async def answer(_: Asked) -> str:
        await release.wait()
        return "yes"

    async with running(store(), configuration_of(model), answer) as (world, (lane,)):
        keys = [key_in([number]) for number in range(GROUP_PARTITIONS)]
        claims = [await world.claim(await world.open_group(key)) for key in keys]
        asking = [
            create_task(said(world, claim, stream=stream))
            for claim in claims
            for stream in (False, True)
        ]
        await lane.has_seen(GROUPS)
        await asyncio.sleep(2 * world.settings.keepalive_s)
        await world.start_another()
        await settled(world)
        release.set()
        answers = await asyncio.gather(*asking)
        sampled = await world.records(topics.REQUESTED_COMPLETIONS)
    assert answers == ["yes"] * 2 * GROUPS
    assert len(sampled) == GROUPS


async def test_a_gateway_that_is_killed_costs_an_agent_no_more_than_a_retry(model: Path) -> None:
    async with gateways(model) as (world, _):
        newest, shares = world.gateways[-1].url, await owners(world)
        world.base_url = newest
        claim = await world.claim(await world.open_group(key_of(newest, shares)))
        assert await said(world, claim) == "yes"
        await world.kill()
        other = world.gateways[0].url
        before_s = asyncio.get_running_loop().time()
        answer = await said(world, at(other, claim), retries=1)
        took_s = asyncio.get_running_loop().time() - before_s
        owner = await owners(world)
    assert answer == "yes"
    assert took_s < 2.5  # It does not wait for a report that does not come.
    assert set(owner.values()) == {other}


@pytest.mark.slow
async def test_a_gateway_that_stops_gives_its_groups_to_the_others(model: Path) -> None:
    async with gateways(model, count=3) as (world, _):
        leaving = world.gateways.pop(0)
        world.base_url = world.gateways[0].url
        claims = [await world.claim(await world.open_group(f"k{n}")) for n in range(GROUPS)]
        stop = create_task(asyncio.wait_for(leaving.task, timeout=10))
        leaving.stop.set()
        answers = [await said(world, at(world.base_url, claim)) for claim in claims]
        await stop
        await settled(world)
        opened = await world.records(topics.OPENED_EPISODES)
    assert answers == ["yes"] * GROUPS
    assert len(opened) == GROUPS


async def tried(world: World, group: str) -> Any:
    """A claim of an episode; None if none became free in time."""
    answer = await world.admin("POST", f"/v1/groups/{group}/claim", {"wait_s": 5})
    assert answer.status_code in (200, 204)
    return answer.json() if answer.status_code == 200 else None


@pytest.mark.slow
async def test_only_one_gateway_ends_what_time_alone_ends(model: Path) -> None:
    configuration = configuration_of(model, lease_s=1.0)
    async with running(store(), configuration, lambda _: "yes") as (world, _):
        await world.start_another()
        await settled(world)
        attempts: list[int] = []
        groups = [await world.open_group(f"k{number}") for number in range(GROUPS)]
        for group in groups:
            for _ in range(4):  # Two attempts at each of two episodes: all that there are.
                while not (claim := await tried(world, group)):
                    pass
                attempts.append(claim["attempt"])
        ends: list[Any] = []
        while len(ends) < 2 * GROUPS:
            await asyncio.sleep(0.05)
            ends = await world.records(topics.FINISHED_EPISODES)
        await asyncio.sleep(1.0)
        assert await world.records(topics.FINISHED_EPISODES) == ends
    assert sorted(attempts) == [0] * 2 * GROUPS + [1] * 2 * GROUPS
    assert sorted((end.group_id, end.index) for end in ends) == sorted(
        (group, index) for group in groups for index in range(2)
    )


async def test_a_peer_url_that_leads_to_another_gateway_is_named(model: Path) -> None:
    async with gateways(model) as (world, _):
        (first, second), shares = [g.url for g in world.gateways], await owners(world)
        world.base_url = first
        claim = await world.claim(await world.open_group(key_of(first, shares)))
        number = (await world.records(topics.OWNED_RUNS))[-1].owner
        async with plain_http() as client:
            answer = await client.post(
                f"{second}/v1/chat/completions",
                json={"messages": HELLO},
                headers={"x-api-key": claim["key"], OWNER_HEADER: sealed(number)},
            )
    assert answer.status_code == 503
    assert "FORGEMQ_GATEWAY_PEER_URL of each gateway must lead to itself" in answer.text
    assert "127.0.0.1" not in answer.text


async def test_a_client_that_leaves_is_missed_where_its_request_went(model: Path) -> None:
    """Its turn is cancelled by the owner, which the client never spoke to."""
    hold = asyncio.Event()

    async def answer(_: Asked) -> str:
        await hold.wait()
        return "yes"

    async with gateways(model, answer) as (world, lane):
        (first, second), shares = [g.url for g in world.gateways], await owners(world)
        world.base_url = first
        claim = await world.claim(await world.open_group(key_of(first, shares)))
        asking = create_task(said(world, at(second, claim)))
        await lane.has_seen(1)
        asking.cancel()
        cancelled = await world.eventually(topics.CANCELLED_COMPLETIONS, 1)
        hold.set()
    assert [each.request_id for each in cancelled] == [lane.seen[0].record.request_id]


async def test_what_only_a_gateway_may_say_is_not_believed_of_a_client(model: Path) -> None:
    """With the present number it would be refused, with a later one held for that change."""
    async with gateways(model) as (world, _):
        (first, second), shares = [g.url for g in world.gateways], await owners(world)
        world.base_url = first
        claim = await world.claim(await world.open_group(key_of(first, shares)))
        number = (await world.records(topics.OWNED_RUNS))[-1].owner
        answers = []
        for said in (str(number), "9" * 17, f"{number} {sealed(number + 1).split(' ')[1]}"):
            async with plain_http() as client:
                answer = await client.post(
                    f"{second}/v1/chat/completions",
                    json={"messages": HELLO},
                    headers={"x-api-key": claim["key"], OWNER_HEADER: said},
                )
                answers.append(answer.status_code)
    assert answers == [200] * 3


@pytest.mark.slow
async def test_an_admin_request_that_waits_while_its_group_moves_is_answered_by_its_new_owner(
    model: Path,
) -> None:
    """A long poll for the group's state, and a claim with its body."""
    async with running(store(), configuration_of(model), lambda _: "yes") as (world, _):
        first = world.base_url
        keys = [key_in([number]) for number in range(GROUP_PARTITIONS)]
        groups = [await world.open_group(key) for key in keys]
        for group in groups:
            for _ in range(2):
                await world.claim(group)
        polling = [
            create_task(world.admin("GET", f"/v1/groups/{group}?wait_s=20&state=admitted"))
            for group in groups
        ]
        claiming = [
            create_task(world.admin("POST", f"/v1/groups/{group}/claim", {"wait_s": 20}))
            for group in groups
        ]
        await asyncio.sleep(0.2)
        await world.start_another()
        await settled(world)
        world.base_url = first
        for group in groups:
            await world.retire(group)
        polled, claimed = await asyncio.gather(*polling), await asyncio.gather(*claiming)
    assert [(each.status_code, each.json()["state"]) for each in polled] == [
        (200, "retired")
    ] * GROUP_PARTITIONS
    assert [each.status_code for each in claimed] == [410] * GROUP_PARTITIONS
