"""Requests that are left: by clients that reset their connections, and by a gateway that stops."""

import asyncio
import json
import logging
import socket
import struct
from asyncio import create_task
from pathlib import Path
from random import Random
from typing import Any

import pytest

from forgemq_contracts import topics
from forgemq_gateway.core.held_bytes import HeldBytes
from forgemq_gateway.http_server import http_server, serve_http
from forgemq_gateway.wire import Receive, Scope, Send
from tests.unit.gateway.scripted_lane import Asked
from tests.unit.gateway.test_replicas import HELLO, gateways, key_of, owners, store
from tests.unit.gateway.world import ADMIN_KEY, World, configuration_of, plain_http, running

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of a socket whose close is a reset."""

CLIENTS = 6
RESETS = 60
"""Of each client: several at each point of each request."""


async def resetting(url: str) -> socket.socket:
    """A connection whose close is a reset."""
    host, _, port = url.removeprefix("http://").partition(":")
    client = socket.socket()
    client.setblocking(False)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
    return client


def request(path: str, body: Any, *, key: str = ADMIN_KEY) -> bytes:
    """A whole request as it is sent."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


async def test_a_reset_is_told_to_the_request_that_is_answered_and_not_to_the_one_behind_it_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[str] = []
    is_asked, has_heard = asyncio.Event(), asyncio.Event()

    async def application(_: Scope, receive: Receive, __: Send) -> None:
        await receive()
        is_asked.set()
        heard.append((await receive())["type"])
        has_heard.set()

    listener = socket.create_server(("127.0.0.1", 0))
    server = http_server(application, half_sent=HeldBytes())
    serving = create_task(serve_http(server, [listener]))
    client = await resetting("127.0.0.1:{1}".format(*listener.getsockname()))
    await asyncio.get_running_loop().sock_sendall(client, 2 * request("/", {}))
    await asyncio.wait_for(is_asked.wait(), 5)
    client.close()
    await asyncio.wait_for(has_heard.wait(), 5)
    server.should_exit = True
    await serving
    assert heard == ["http.disconnect"]
    assert errors_in(caplog) == []


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]


@pytest.mark.slow
async def test_a_gateway_that_stops_refuses_who_still_waits_with_503(model: Path) -> None:
    """A turn of its own that no lane answers, and a claim that waits at another gateway."""

    async def never(_: Asked) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    async with gateways(model, never) as (world, lane):
        (first, second), shares = [g.url for g in world.gateways], await owners(world)
        mine, others = key_of(first, shares), key_of(second, shares)
        world.base_url = first
        claim = await world.claim(await world.open_group(mine))
        body = {"model": "m", "messages": HELLO}
        asking = create_task(world.admin("POST", "/v1/chat/completions", body, key=claim["key"]))
        await lane.has_seen(1)
        group = await world.open_group(others)
        for _ in range(2):
            await world.claim(group)
        claiming = create_task(world.admin("POST", f"/v1/groups/{group}/claim", {"wait_s": 30}))
        await asyncio.sleep(0.1)
        leaving = world.gateways.pop(0)
        leaving.stop.set()
        answers = await asyncio.gather(asking, claiming)
        await leaving.task
    assert [(each.status_code, each.headers["retry-after"]) for each in answers] == [(503, "1")] * 2


@pytest.mark.slow
async def test_clients_that_reset_their_connections_cost_no_other_one_an_answer(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At every point of a request, through gateways that own its group and that send it on."""
    async with running(store(), configuration_of(model), lambda _: "yes " * 20) as (world, _):
        await world.start_another()
        claim = await world.claim(await world.open_group("k1"))
        async with asyncio.TaskGroup() as tasks:
            for number in range(CLIENTS):
                tasks.create_task(_reset_some(world, claim, Random(number)))
            talking = tasks.create_task(_talk(world, claim["key"]))
        path = f"/v1/episodes/{claim['episode_id']}/finish"
        finished = await world.admin("POST", path, {})
        (end,) = await world.records(topics.FINISHED_EPISODES)
    assert talking.result() == [200] * CLIENTS
    assert finished.status_code == 200
    assert end.status == "completed"
    assert errors_in(caplog) == []


async def _reset_some(world: World, claim: Any, random: Random) -> None:
    """Send requests, whole and cut, one or several at once, and reset each connection."""
    said: list[Any] = [{"role": "user", "content": "hello " * random.randrange(1, 4)}]
    chat = {"model": "m", "messages": said, "stream": random.random() < 0.5}
    group = {"domain": "shop", "idempotency_key": "k1", "task": {"n": 1}}
    requests = (
        request("/v1/chat/completions", chat, key=claim["key"]),
        request("/v1/messages", {**chat, "max_tokens": 9}, key=claim["key"]),
        request("/v1/groups", group),
        request(f"/v1/groups/{claim['group_id']}/claim", {"wait_s": 0}),
        request(f"/v1/episodes/{claim['episode_id']}/heartbeat", {}),
    )
    loop = asyncio.get_running_loop()
    for number in range(RESETS):
        data = random.choice(requests) * random.choice((1, 1, 1, 2))
        client = await resetting(world.gateways[number % 2].url)
        await loop.sock_sendall(client, data[: random.choice((len(data), len(data) // 2, 20))])
        if number % 3:
            await asyncio.sleep(random.random() / 50)
        client.close()


async def _talk(world: World, key: str) -> list[int]:
    """Statuses of turns that are asked for through one gateway and the other."""
    found = []
    async with plain_http(timeout_s=30) as client:
        for number in range(CLIENTS):
            answer = await client.post(
                f"{world.gateways[number % 2].url}/v1/chat/completions",
                json={"model": "m", "messages": [{"role": "user", "content": f"turn {number}"}]},
                headers={"authorization": f"Bearer {key}"},
            )
            found.append(answer.status_code)
            await asyncio.sleep(0.05)
    return found
