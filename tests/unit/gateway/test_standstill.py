"""A gateway that stood still serves nothing before it knows who owns its groups by now."""

import asyncio
import json
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from forgemq_bus.log import Log, Place
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.ownership import OwnedRun, PartitionOwner
from forgemq_gateway.standstill import MISSED_S
from tests.unit.gateway.scripted_lane import GROUP_PARTITIONS, Asked, ScriptedLane, wall_ms
from tests.unit.gateway.world import SETTINGS, World, configuration_of, running

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
MORE: list[Any] = [*HELLO, {"role": "assistant", "content": "yes"}, *HELLO]
OTHER = "http://127.0.0.1:9"


class HeldReader:
    """Reads records about owners only while the test lets it."""

    def __init__(self, reader: Any, goes_on: asyncio.Event) -> None:
        self._reader, self._goes_on = reader, goes_on

    async def read(self, **how: Any) -> Any:
        records = await self._reader.read(**how)
        await self._goes_on.wait()
        return records

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


class HeldLog:
    """A log whose feed of owners may be behind, as that of a process that has just woken."""

    def __init__(self, log: Any, goes_on: asyncio.Event) -> None:
        self._log, self._goes_on = log, goes_on

    async def reader(self, positions: Mapping[Place, int], **how: Any) -> Any:
        reader = await self._log.reader(positions, **how)
        is_feed = how.get("gathers", False)
        return HeldReader(reader, self._goes_on) if is_feed else reader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


def held_store(goes_on: asyncio.Event) -> Callable[[], Log]:
    store = MemoryLog(run="r", clock_ms=wall_ms)
    return lambda: HeldLog(store.open(), goes_on)


async def give_all_to_another(world: World) -> None:
    newest = (await world.records(topics.OWNED_RUNS))[-1]
    owner = PartitionOwner(
        gateway=f"{OTHER}#1", url=OTHER, partitions=tuple(range(GROUP_PARTITIONS))
    )
    record = OwnedRun(
        run="r", owner=newest.owner + 1, owned_ms=wall_ms(), url=OTHER, owners=(owner,)
    )
    await world.write(topics.OWNED_RUNS, 0, record)


def request_of(claim: Any, messages: list[Any]) -> bytes:
    body = json.dumps({"model": "m", "messages": messages}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\nx-api-key: {claim['key']}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def connected(claim: Any) -> socket.socket:
    where = urlsplit(claim["base_url"])
    return socket.create_connection((where.hostname, where.port))


def asked(claim: Any, messages: list[Any]) -> socket.socket:
    """A connection with a request that nobody has read yet."""
    client = connected(claim)
    client.sendall(request_of(claim, messages))
    return client


async def stand_still() -> None:
    """Let nothing of this process go on for a while, and then let it act on what came meanwhile."""
    time.sleep(1.5 * MISSED_S)  # noqa: ASYNC251 - this is what is tested
    await asyncio.sleep(0.3)


async def requested(world: World) -> int:
    return len(await world.records(topics.REQUESTED_COMPLETIONS))


async def first_turn(world: World, lane: ScriptedLane) -> Any:
    claim = await world.episode()
    await world.client(claim).chat.completions.create(model="m", messages=HELLO)
    await lane.has_seen(1)
    return claim


@pytest.mark.slow
@pytest.mark.parametrize("stays", [True, False])
async def test_a_gateway_that_goes_on_begins_no_turn_of_a_group_that_another_one_owns(
    model: Path, *, stays: bool
) -> None:
    """The whole process stands still, with a request in its socket and a change on the log."""
    goes_on = asyncio.Event()
    goes_on.set()
    async with running(held_store(goes_on), configuration_of(model), lambda _: "yes") as (
        world,
        (lane,),
    ):
        claim = await first_turn(world, lane)
        goes_on.clear()
        await give_all_to_another(world)
        client = asked(claim, MORE)
        if not stays:
            client.close()
        await stand_still()
        before_it_knows = await requested(world)
        goes_on.set()
        # The other one does not answer, so the gateway takes its groups back, and serves them.
        if stays:
            await world.eventually(topics.DELIVERED_COMPLETIONS, 2)
            client.close()
        else:
            await world.eventually(topics.OWNED_RUNS, 3)
            await asyncio.sleep(0.5)
        in_the_end = await requested(world)
    assert before_it_knows == 1
    assert in_the_end == (2 if stays else 1)


@pytest.mark.slow
@pytest.mark.parametrize("waits", ["for the rest of its body", "for a place"])
async def test_a_request_that_came_before_a_standstill_begins_no_turn_of_what_another_one_owns(
    model: Path, *, waits: str
) -> None:
    goes_on, answers = asyncio.Event(), asyncio.Event()
    goes_on.set()

    async def answer(_: Asked) -> str:
        await answers.wait()
        return "yes"

    one_at_a_time = msgspec.structs.replace(SETTINGS, requests_max=1, lane_hold_s=30.0)
    async with running(
        held_store(goes_on), configuration_of(model), answer, settings=one_at_a_time
    ) as (world, (lane,)):
        claim = await world.episode()
        if waits == "for a place":
            first = asked(claim, HELLO)
            await lane.has_seen(1)
            client = asked(claim, MORE)
        else:
            client = connected(claim)
            begin, rest = (request := request_of(claim, HELLO))[:-5], request[-5:]
            client.sendall(begin)
        await asyncio.sleep(0.3)
        before = await requested(world)
        goes_on.clear()
        await give_all_to_another(world)
        if waits == "for a place":
            first.close()  # Its place is free once the gateway notices.
        else:
            client.sendall(rest)
        await stand_still()
        before_it_knows = await requested(world)
        cancelled = await world.records(topics.CANCELLED_COMPLETIONS)
        goes_on.set()
        answers.set()
        # The other one does not answer, so the gateway takes its groups back, and serves them.
        await world.eventually(topics.DELIVERED_COMPLETIONS, 1)
        in_the_end = await requested(world)
        client.close()
    assert (before, before_it_knows, in_the_end) == (before, before, before + 1)
    # A turn that another one owns is not ended because its client left here.
    assert cancelled == []
