"""Who owns which groups is on the log, and so is every key that was ever used."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from forgemq_bus.errors import FencedError, LogUnavailableError
from forgemq_bus.log import Emit, Log, Place
from forgemq_bus.memory import MemoryLog
from forgemq_bus.partitions import partitions_of
from forgemq_contracts import topics
from forgemq_contracts.admin import FinishRequest
from forgemq_contracts.asked_keys import KEYS_MAX, AskedKeys
from forgemq_contracts.groups import RequestedGroup
from forgemq_contracts.messages import Output
from forgemq_contracts.ownership import ReportedGateway
from forgemq_gateway.clock import Clock
from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.core.gateways import Gateways
from forgemq_gateway.core.repeated import check_new
from forgemq_gateway.fenced_writer import writer_of
from forgemq_gateway.marks import NEEDED_GROUP
from forgemq_gateway.ownership import OWNERS_WRITER, PLACE, Owners, ReadBack, newest_owners
from forgemq_shell.records import emit_of
from tests.unit.gateway.scripted_lane import wall_ms
from tests.unit.gateway.test_abandoned import scene_of
from tests.unit.gateway.test_held_and_leased import admitted
from tests.unit.gateway.world import World, configuration_of, running

GROUP = {"domain": "shop", "idempotency_key": "shop/0", "task": {"n": 1}}


def store() -> Callable[[], MemoryLog]:
    return MemoryLog(run="r", clock_ms=wall_ms).open


@asynccontextmanager
async def in_world(model: Path) -> AsyncIterator[World]:
    async with running(store(), configuration_of(model), lambda _: "yes") as (world, _):
        yield world


def owners_of(log: Log, name: str = "a") -> Owners:
    gateways = Gateways(f"http://{name}#1", url=f"http://{name}", partitions=3)
    return Owners(log, run="r", gateways=gateways, clock=Clock())


async def test_what_one_of_two_readers_has_applied_says_nothing_of_the_other() -> None:
    log = store()()
    other = Place("a", 1)
    await log.create_topics({PLACE.topic: 1, "a": 2})
    writer = await log.writer()
    for place in (PLACE, other):
        await writer.write(Emit(topic=place.topic, partition=place.partition, key=b"", value=b"x"))
    read_back = ReadBack(log, wait_s=0.05)
    await read_back.note({PLACE: 1})
    with pytest.raises(LogUnavailableError, match="reads the log too late"):
        await read_back.until_now([PLACE, other])
    await read_back.note({other: 1})
    await read_back.until_now([PLACE, other])


async def test_each_change_of_owners_has_the_next_number_and_names_all_owners() -> None:
    log = store()()
    await log.create_topics({PLACE.topic: 1})
    await owners_of(log, "a").take_over({0, 1, 2})
    record = await owners_of(log, "b").take_over({2})
    assert await newest_owners(log) == record
    owners = {owner.url: owner.partitions for owner in record.owners}
    assert (record.owner, owners) == (2, {"http://a": (0, 1), "http://b": (2,)})


async def test_of_two_changes_at_once_the_later_one_fences_the_earlier() -> None:
    log = store()()
    await log.create_topics({PLACE.topic: 1})
    earlier = await log.transaction_writer(OWNERS_WRITER)
    record = await owners_of(log).take_over({0})
    emit = emit_of(Output(topic=PLACE.topic, partition=0, record=record))
    with pytest.raises(FencedError):
        await earlier.commit(outputs=[emit], group=OWNERS_WRITER, positions={})


@pytest.mark.parametrize("aborted", [23, 24, 25, 50, 500])
async def test_owners_are_found_behind_any_number_of_changes_that_failed(aborted: int) -> None:
    """As a gateway leaves them that starts again and again while the coordinator is away."""
    log = store()()
    await log.create_topics({PLACE.topic: 1})
    first = await owners_of(log).take_over({0})
    writer = await log.transaction_writer(OWNERS_WRITER)
    record = Output(topic=PLACE.topic, partition=0, record=first)
    for _ in range(aborted):
        await writer.abort(outputs=[emit_of(record)])
    assert (await owners_of(log).take_over({1})).owner == 2


async def test_what_a_fenced_gateway_decides_is_not_written_before_it_knows_who_owns_what(
    model: Path,
) -> None:
    """The new owner has read what was durable: it would not know the agent's episode."""
    async with scene_of(model) as scene:
        scene.operations.public_url = "http://here"
        scene.context.registry.apply_admitted_group(record := admitted(0))
        group = record.group_id
        first = await scene.operations.claim(group, wait_s=0, has_left=lambda: False)
        await owners_of(scene.log).take_over({0, 1, 2})
        await (await scene.log.transaction_writer(writer_of("http://here#1"))).close()
        places = partitions_of(topics.OPENED_EPISODES, scene.context.configuration)
        before = await scene.log.end_positions(places)
        with pytest.raises(LogUnavailableError, match="reads the log too late"):
            await scene.operations.claim(group, wait_s=0, has_left=lambda: False)
        assert first is not None
        with pytest.raises(LogUnavailableError, match="reads the log too late"):
            await scene.operations.finish(first.episode_id, FinishRequest())
        assert await scene.log.end_positions(places) == before
    assert scene.ends == []


async def test_a_gateway_that_was_killed_is_replaced_without_a_wait(model: Path) -> None:
    async with in_world(model) as world:
        await asyncio.wait_for(world.restart(), timeout=10)
        owners = [record.owner for record in await world.records(topics.OWNED_RUNS)]
        assert (await world.admin("POST", "/v1/groups", GROUP)).status_code == 200
    assert owners[:2] == [1, 2]


async def test_a_gateway_takes_over_from_one_that_started_with_a_clock_an_hour_ahead(
    model: Path,
) -> None:
    """Both have one address, and a report of the first is the newest on the log."""
    async with in_world(model) as world:
        await world.kill()
        url, ahead_ms = "http://gateway-0:8000", wall_ms() + 3_600_000
        dead = ReportedGateway(
            run="r", gateway="dead", url=url, started_ms=ahead_ms, reported_ms=ahead_ms
        )
        await world.write(topics.REPORTED_GATEWAYS, 0, dead)
        world.settings = msgspec.structs.replace(world.settings, peer_url=url)
        await asyncio.wait_for(world.start_another(), timeout=10)
        assert (await world.admin("POST", "/v1/groups", GROUP)).status_code == 200
        owner = (await world.records(topics.OWNED_RUNS))[-1].owners[0]
    assert (owner.url, owner.gateway.startswith(url)) == (url, True)


async def test_a_key_is_known_when_all_records_of_its_group_are_gone(model: Path) -> None:
    """The run is older than what the log keeps: only the owner's record knows the key."""

    async with in_world(model) as world:
        world.settings = msgspec.structs.replace(world.settings, mark_every_s=0.05)
        await world.restart()
        group = (await world.admin("POST", "/v1/groups", GROUP)).json()["group_id"]
        await world.admit(group)
        await world.retire(group, reason="trained")
        await until_over(world)
        await world.kill()
        await trim_all(world, topics.REQUESTED_GROUPS, topics.RETIRED_GROUPS)
        await world.start_another()
        again = (await world.admin("POST", "/v1/groups", {**GROUP, "task": {"n": 2}})).json()
        run = (await world.admin("GET", "/v1/run")).json()
        by_id = await world.admin("GET", f"/v1/groups/{group}")
    assert (again["group_id"], again["state"], again["retire_reason"]) == (group, "retired", "")
    assert run["first_tasks"] == {"shop": 1}
    assert by_id.status_code == 404


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
    with pytest.raises(
        RefusedError, match=f"idempotency_key: a run remembers at most {KEYS_MAX}"
    ) as refused:
        check_new(asked, request)
    assert (refused.value.status, refused.value.code) == (400, "keys_full")
    check_new(asked, msgspec.structs.replace(request, idempotency_key="shop/0"))
