"""A record that the log does not take costs its own request, and nobody else."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from forgemq_bus.blobs import BlobStore
from forgemq_bus.errors import AccessError, LogUnavailableError
from forgemq_bus.log import Emit
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from tests.unit.gateway.hindered_log import Hinder, HinderedLog
from tests.unit.gateway.scripted_lane import Asked, wall_ms
from tests.unit.gateway.world import ADMIN_KEY, SETTINGS, configuration_of, running

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def hindered(hinder: Hinder) -> Callable[[], Any]:
    store = MemoryLog(run="r", clock_ms=wall_ms)
    return lambda: HinderedLog(store.open(), hinder)


async def never(_: Asked) -> str:
    await asyncio.Event().wait()
    return ""


async def test_a_finish_does_not_wait_for_the_cancellation_of_what_its_agent_left(
    model: Path,
) -> None:
    released = asyncio.Event()

    async def hold(emit: Emit) -> None:
        if emit.topic == topics.CANCELLED_COMPLETIONS.name:
            await released.wait()

    drain_s, loop = 100.0, asyncio.get_running_loop()
    configuration = configuration_of(model)
    async with running(hindered(hold), configuration, never, drain_s=drain_s) as (world, (lane,)):
        claim = await world.episode()
        asking = world.client(claim).chat.completions.create(model="m", messages=HELLO)
        leaving = asyncio.create_task(asking)
        await lane.has_seen(1)
        began_s = loop.time()
        path = f"/v1/episodes/{claim['episode_id']}/finish"
        finishing = asyncio.create_task(world.admin("POST", path, {"result": 1}))
        await asyncio.sleep(0.1)
        leaving.cancel()
        finished = await finishing
        took_s = loop.time() - began_s
        released.set()
    assert finished.status_code == 200
    assert took_s < drain_s / 2


async def test_a_turn_that_the_log_does_not_take_is_503_and_its_repetition_is_answered(
    model: Path,
) -> None:
    broken = {topics.REQUESTED_COMPLETIONS.name}

    async def fail(emit: Emit) -> None:
        if emit.topic in broken:
            raise LogUnavailableError("no answer in time")

    async with running(hindered(fail), configuration_of(model), lambda _: "yes") as (world, _):
        client = world.client(await world.episode())
        with pytest.raises(openai.InternalServerError) as refused:
            await client.chat.completions.create(model="m", messages=HELLO)
        broken.clear()
        again = await client.chat.completions.create(model="m", messages=HELLO)
        sent = await world.records(topics.REQUESTED_COMPLETIONS)
    assert refused.value.status_code == 503
    assert refused.value.response.headers["retry-after"] == "5"
    assert again.choices[0].message.content == "yes"
    assert [record.attempt for record in sent] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_answer_whose_delivery_the_log_does_not_take_is_503_and_its_repetition_is_given_it(
    model: Path, is_stream: bool
) -> None:
    broken = {topics.DELIVERED_COMPLETIONS.name}

    async def fail(emit: Emit) -> None:
        if emit.topic in broken:
            raise LogUnavailableError("no answer in time")

    async with running(hindered(fail), configuration_of(model), lambda _: "yes") as (
        world,
        (lane,),
    ):
        client = world.client(await world.episode())
        asking = client.chat.completions
        with pytest.raises(openai.InternalServerError) as refused:
            await asking.create(model="m", messages=HELLO, stream=is_stream)
        broken.clear()
        again = await asking.create(model="m", messages=HELLO)
        asked = len(lane.seen)
    assert refused.value.status_code == 503
    assert refused.value.response.headers["retry-after"] == "5"
    assert again.choices[0].message.content == "yes"
    assert asked == 1


async def test_a_stream_that_is_open_when_the_log_takes_no_delivery_ends_with_an_error_event(
    model: Path,
) -> None:
    broken = {topics.DELIVERED_COMPLETIONS.name}

    async def fail(emit: Emit) -> None:
        if emit.topic in broken:
            raise LogUnavailableError("no answer in time")

    async def slow(_: Asked) -> str:
        await asyncio.sleep(2 * SETTINGS.keepalive_s)
        return "yes"

    async with running(hindered(fail), configuration_of(model), slow) as (world, (lane,)):
        asking = world.client(await world.episode()).chat.completions
        stream = await asking.create(model="m", messages=HELLO, stream=True)
        with pytest.raises(openai.APIError, match="the log takes no record"):
            [chunk async for chunk in stream]
        broken.clear()
        again = await asking.create(model="m", messages=HELLO)
        asked = len(lane.seen)
    assert (again.choices[0].message.content, asked) == ("yes", 1)


async def test_a_group_that_the_log_does_not_take_is_503(model: Path) -> None:
    async def fail(emit: Emit) -> None:
        if emit.topic == topics.REQUESTED_GROUPS.name:
            raise LogUnavailableError("no answer in time")

    body = {"domain": "shop", "idempotency_key": "k", "task": {}}
    async with running(hindered(fail), configuration_of(model), lambda _: "yes") as (world, _):
        refused = await world.admin("POST", "/v1/groups", body)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")


async def test_what_a_blob_store_that_is_away_does_not_take_is_503_and_may_be_sent_again(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "blobs").touch()  # No folder, as when nothing is mounted there.
    blobs = BlobStore(str(tmp_path / "blobs"), run="r")
    store = MemoryLog(run="r", clock_ms=wall_ms, blobs=blobs, inline_bytes_max=10_000)
    long = {"text": "x" * 20_000}
    configuration = configuration_of(model)
    async with running(store.open, configuration, lambda _: "yes") as (world, _):
        body = {"domain": "shop", "idempotency_key": "long", "task": long}
        asked = await world.admin("POST", "/v1/groups", body)
        path = f"/v1/episodes/{(await world.episode())['episode_id']}/finish"
        refused = await world.admin("POST", path, {"result": long})
        (tmp_path / "blobs").unlink()
        ended = await world.admin("POST", path, {"result": long})
        asked_again = await world.admin("POST", "/v1/groups", body)
    for each in (asked, refused):
        assert each.status_code == 503
        assert each.headers["retry-after"] == "5"
        assert each.json()["error"]["type"] == "server_error"
    assert (ended.status_code, asked_again.status_code) == (200, 200)


@pytest.mark.parametrize("topic", [topics.OPENED_EPISODES, topics.DELIVERED_COMPLETIONS])
async def test_a_broker_that_trusts_the_gateway_no_more_makes_its_requests_503(
    model: Path, topic: topics.Topic
) -> None:
    refused = set[str]()

    async def refuse(emit: Emit) -> None:
        if emit.topic in refused:
            raise AccessError("the password is wrong")

    async with running(hindered(refuse), configuration_of(model), lambda _: "yes") as (world, _):
        claim = await world.episode()
        refused.add(topic.name)
        chat: Any = {"model": "m", "messages": HELLO}
        path, body, key = {
            topics.OPENED_EPISODES: (f"/v1/groups/{claim['group_id']}/claim", {}, ADMIN_KEY),
            topics.DELIVERED_COMPLETIONS: ("/v1/chat/completions", chat, claim["key"]),
        }[topic]
        answer = await world.admin("POST", path, body, key=key)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
