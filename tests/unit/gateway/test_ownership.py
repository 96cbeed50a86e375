"""One gateway owns a run, and knows every key that was ever used in it."""

import asyncio
from asyncio import create_task
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
import uvicorn

from forgemq_bus.errors import LogUnavailableError
from forgemq_bus.log import Log
from forgemq_bus.memory import MemoryLog
from forgemq_bus.partitions import partitions_of
from forgemq_contracts import topics
from forgemq_contracts.admin import FinishRequest
from forgemq_contracts.asked_keys import KEYS_MAX, AskedKeys
from forgemq_contracts.groups import RequestedGroup
from forgemq_contracts.messages import Output
from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.core.repeated import check_new
from forgemq_gateway.core.replies import Reply
from forgemq_gateway.feed import Feed
from forgemq_gateway.handover import Handover
from forgemq_gateway.marks import NEEDED_GROUP
from forgemq_gateway.ownership import PLACE, Claimed, ReplacedError, claim_run
from forgemq_gateway.ticks import TICK_S, keep_ticking
from forgemq_shell.records import emit_of
from tests.unit.gateway.scripted_lane import Asked, wall_ms
from tests.unit.gateway.test_abandoned import scene_of
from tests.unit.gateway.test_held_and_leased import admitted
from tests.unit.gateway.world import World, configuration_of, running

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
GROUP = {"domain": "shop", "idempotency_key": "shop/0", "task": {"n": 1}}


def store() -> Callable[[], MemoryLog]:
    return MemoryLog(run="r", clock_ms=wall_ms).open


@asynccontextmanager
async def in_world(model: Path) -> AsyncIterator[World]:
    async with running(store(), configuration_of(model), lambda _: "yes") as (world, _):
        yield world


async def claimed(log: Log) -> Claimed:
    return await claim_run(log, run="r", url="http://here", at_ms=1)


async def test_each_claim_is_higher_than_all_before_and_the_older_one_hears_of_it() -> None:
    log = store()()
    await log.create_topics({PLACE.topic: 1})
    first, second = await claimed(log), await claimed(log.open())
    assert (first.record.owner, second.record.owner) == (1, 2)
    second.check(first.record)
    with pytest.raises(ReplacedError, match="gateway 2 at http://here has taken over run r"):
        first.check(second.record)


@pytest.mark.parametrize("aborted", [23, 24, 25, 50, 500])
async def test_an_owner_is_found_behind_any_number_of_claims_that_failed(aborted: int) -> None:
    """As a gateway leaves them that starts again and again while the coordinator is away."""
    log = store()()
    await log.create_topics({PLACE.topic: 1})
    first = await claimed(log)
    writer = await log.transaction_writer(NEEDED_GROUP)
    record = Output(topic=PLACE.topic, partition=0, record=first.record)
    for _ in range(aborted):
        await writer.abort(outputs=[emit_of(record)])
    assert (await claimed(log)).record.owner == 2


async def test_the_older_of_two_gateways_ends_and_the_newer_one_serves(model: Path) -> None:
    async with in_world(model) as world:
        group = await world.open_group()
        older_url, older = world.base_url, world._gateway
        assert world.tasks is not None
        assert older is not None
        ended = asyncio.Event()
        world.on_replaced = ended.set
        await world.start(world.tasks)
        await asyncio.wait_for(ended.wait(), timeout=10)
        await asyncio.wait([older])
        with pytest.raises(httpx.ConnectError):
            async with httpx.AsyncClient(verify=False) as client:
                await client.get(f"{older_url}/health")
        claim = await world.claim(group)
        records = await world.records(topics.OPENED_EPISODES)
    assert [record.episode_id for record in records] == [claim["episode_id"]]


async def test_a_gateway_that_was_replaced_writes_nothing_by_time_alone(model: Path) -> None:
    """Its clients may take seconds to leave; leases that lapse meanwhile are the new owner's."""
    async with scene_of(model) as scene:
        feed = Feed(
            scene.log,
            dispatcher=scene.dispatcher,
            parse=lambda *_: Reply(),
            context=scene.context,
            ready=asyncio.Event(),
        )
        await feed.restore(url="http://here")
        server = uvicorn.Server(uvicorn.Config("nothing:is_loaded"))
        handover = Handover(server, dispatcher=scene.dispatcher, operations=scene.operations)
        ticking = create_task(
            keep_ticking(scene.context, dispatcher=scene.dispatcher, operations=scene.operations)
        )
        following = create_task(handover.follow(feed, owners=[ticking]))
        scene.episode(0)
        await claimed(scene.log)
        await following
        scene.clock.at_s[0] += 11.0
        await asyncio.sleep(4 * TICK_S)
    assert ticking.cancelled()
    assert server.should_exit
    assert scene.ends == []


async def test_what_becomes_durable_after_another_claim_is_promised_to_nobody(model: Path) -> None:
    """The new owner has read the log up to its claim: it would not know the agent's episode."""
    async with scene_of(model) as scene:
        scene.operations.public_url = "http://here"
        scene.context.registry.apply_admitted_group(record := admitted(0))
        group = record.group_id
        first = await scene.operations.claim(group, wait_s=0)
        await claimed(scene.log)
        with pytest.raises(LogUnavailableError, match="another gateway may own the run"):
            await scene.operations.claim(group, wait_s=0)
        assert first is not None
        with pytest.raises(LogUnavailableError, match="another gateway may own the run"):
            await scene.operations.finish(first.episode_id, FinishRequest())


async def test_a_client_of_the_older_gateway_hears_who_has_the_run_and_its_turn_goes_on(
    model: Path,
) -> None:
    release = asyncio.Event()

    async def answer(asked: Asked) -> str:
        await release.wait()
        return "yes"

    async with running(store(), configuration_of(model), answer) as (world, (lane,)):
        claim = await world.episode()
        ask = partial(world.client(claim).chat.completions.create, model="m", messages=HELLO)
        whole, stream = create_task(ask()), create_task(ask(stream=True))
        await lane.has_seen(1)
        await asyncio.sleep(2 * world.settings.keepalive_s)
        ended = asyncio.Event()
        world.on_replaced = ended.set
        assert world.tasks is not None
        await world.start(world.tasks)
        with pytest.raises(openai.InternalServerError, match=f"2 at {world.base_url} has taken"):
            await whole
        with pytest.raises(openai.APIError, match=f"2 at {world.base_url} has taken"):
            async for _ in await stream:
                pass
        await asyncio.wait_for(ended.wait(), timeout=10)
        release.set()
        again = world.client({**claim, "base_url": f"{world.base_url}/v1"})
        assert (await again.chat.completions.create(model="m", messages=HELLO)).choices
        assert await world.records(topics.CANCELLED_COMPLETIONS) == []
    assert {asked.record.request_id for asked in lane.seen} == {lane.seen[0].record.request_id}


async def test_a_gateway_that_was_killed_is_replaced_without_a_wait(model: Path) -> None:
    async with in_world(model) as world:
        await world.kill()
        assert world.tasks is not None
        await asyncio.wait_for(world.start(world.tasks), timeout=10)
        owners = [record.owner for record in await world.records(topics.OWNED_RUNS)]
        assert (await world.admin("POST", "/v1/groups", GROUP)).status_code == 200
    assert owners == [1, 2]


async def test_a_key_is_known_when_all_records_of_its_group_are_gone(model: Path) -> None:
    """The run is older than what the log keeps: only the owner's record knows the key."""

    async with in_world(model) as world:
        world.settings = msgspec.structs.replace(world.settings, mark_every_s=0.05)
        await restarted(world)
        group = (await world.admin("POST", "/v1/groups", GROUP)).json()["group_id"]
        await world.admit(group)
        await world.retire(group, reason="trained")
        await until_over(world)
        await world.kill()
        await trim_all(world, topics.REQUESTED_GROUPS, topics.RETIRED_GROUPS)
        assert world.tasks is not None
        await world.start(world.tasks)
        again = (await world.admin("POST", "/v1/groups", {**GROUP, "task": {"n": 2}})).json()
        run = (await world.admin("GET", "/v1/run")).json()
        by_id = await world.admin("GET", f"/v1/groups/{group}")
    assert (again["group_id"], again["state"], again["retire_reason"]) == (group, "retired", "")
    assert run["first_tasks"] == {"shop": 1}
    assert by_id.status_code == 404


async def restarted(world: World) -> None:
    await world.kill()
    assert world.tasks is not None
    await world.start(world.tasks)


async def until_over(world: World) -> None:
    """Wait until no restart needs the records that are there, and the keys are written."""
    places = [
        place
        for topic in (topics.REQUESTED_GROUPS, topics.ADMITTED_GROUPS, topics.RETIRED_GROUPS)
        for place in partitions_of(topic, world.configuration)
    ]
    ends = await world.log.end_positions(places)
    for _ in range(200):
        if await world.log.committed(group=NEEDED_GROUP, places=places) == ends:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the group is still needed")


async def trim_all(world: World, *of: topics.Topic) -> None:
    places = [place for topic in of for place in partitions_of(topic, world.configuration)]
    await world.log.trim(await world.log.end_positions(places))


def test_a_key_of_a_kind_that_is_full_is_refused_by_name() -> None:
    asked = AskedKeys()
    for number in range(KEYS_MAX):
        asked.add(f"k{number}", domain="shop")
    request = RequestedGroup(
        group_id="g-1",
        domain="shop",
        purpose="train",
        group_size=2,
        task=b"{}",
        idempotency_key="one more",
        requested_ms=0,
    )
    with pytest.raises(RefusedError, match=f"idempotency_key: a run remembers at most {KEYS_MAX}"):
        check_new(asked, request)
    check_new(asked, msgspec.structs.replace(request, idempotency_key="shop/0"))
