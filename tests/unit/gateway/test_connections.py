"""Requests that are only half there: they end by a deadline, and what they sent is counted."""

import asyncio
import errno
import logging
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
import uvicorn
import uvloop

from forgemq_bus.memory import MemoryLog
from forgemq_gateway.body_memory import BodyMemory
from forgemq_gateway.connections import ENDED_AT_ONCE, DeadlineConnection, SparseLog
from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.core.held_bytes import HeldBytes
from forgemq_gateway.http_server import (
    ACCEPTED_AT_ONCE,
    Acceptor,
    allow_connections,
    http_server,
    serve_http,
)
from forgemq_gateway.wire import Receive, Scope, Send, read_body
from tests.unit.gateway.scripted_lane import wall_ms
from tests.unit.gateway.world import configuration_of, running

LINE = b"POST / HTTP/1.1\r\nhost: x\r\n"
LONG_BYTES = 1 << 25  # More than the buffers of any socket.
WHOLE = LINE + b"content-length: 2\r\n\r\nok"


class ShortDeadlines(DeadlineConnection):
    headers_s = 0.1
    body_s = 0.3
    write_s = 0.2


async def application(_: Scope, receive: Receive, send: Send) -> None:
    body = await read_body(receive, bytes_max=1 << 20, headers={})
    if body == b"slow":
        await asyncio.sleep(0.6)
    if body == b"long":
        await _answer_at_length(send)
        return
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


async def _answer_at_length(send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(LONG_BYTES // 65_536):
        await send({"type": "http.response.body", "body": bytes(65_536), "more_body": True})
    await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    config = uvicorn.Config(
        application, http=ShortDeadlines, lifespan="off", log_config=None, port=0
    )
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        server.should_exit = True
        server.force_exit = True
        await server.shutdown()


@pytest.mark.parametrize(
    "sent",
    [b"", b"\r\n", b"POST / HT", LINE, WHOLE + LINE, LINE + b"content-length: 9\r\n\r\nhalf"],
    ids=[
        "nothing",
        "an empty line",
        "half a line",
        "half the headers",
        "after a whole one",
        "half the body",
    ],
)
async def test_a_request_that_is_not_complete_in_time_is_closed_with_408(sent: bytes) -> None:
    async with connected() as (reader, writer):
        writer.write(sent)
        said = await asyncio.wait_for(reader.read(), 5)
    assert said.count(b"HTTP/1.1 200") == sent.count(b"ok")
    assert b"HTTP/1.1 408 Request Timeout" in said


@pytest.mark.slow
async def test_many_late_requests_are_ended_a_few_at_a_time() -> None:
    server = http_server(application, half_sent=HeldBytes())
    http: Any = server.config.http
    http.headers_s = 2.0
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    clients = connections_to(listener, count=10 * ENDED_AT_ONCE)
    serving = asyncio.create_task(serve_http(server, [listener]))
    counts = [0]
    while counts[-1] < len(clients):
        await asyncio.sleep(0)
        counts.append(len(server.server_state.connections))
        assert counts[-1] >= counts[-2], "the first are late before the last are there"
    time.sleep(http.headers_s)  # noqa: ASYNC251 - so that all of them are late at once
    while counts[-1]:
        await asyncio.sleep(0)
        counts.append(len(server.server_state.connections))
    assert max(before - after for before, after in pairwise(counts)) == ENDED_AT_ONCE
    for client in clients:
        client.close()
    server.should_exit = True
    await serving


async def test_bytes_that_trickle_do_not_stretch_the_deadline() -> None:
    async with connected() as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\n")
        read = asyncio.ensure_future(reader.read())
        for number in range(200):
            if read.done():
                break
            writer.write(b"x-%d: y\r\n" % number)
            await asyncio.sleep(0.02)
        assert read.done()


async def test_a_request_behind_one_that_is_answered_slowly_waits_for_it() -> None:
    slow = LINE + b"content-length: 4\r\n\r\nslow"
    async with connected() as (reader, writer):
        writer.write(slow + WHOLE)
        said = b""
        while said.count(b"HTTP/1.1 200") < 2:
            said += await asyncio.wait_for(reader.read(1000), 5)
    assert b"408" not in said


async def test_a_client_that_does_not_read_its_answer_is_left() -> None:
    async with connected() as (reader, writer):
        writer.write(LINE + b"content-length: 4\r\n\r\nlong")
        await asyncio.sleep(1.0)
        received = len(await asyncio.wait_for(reader.read(), 5))
    assert received < LONG_BYTES, "what the sockets held, and no end"


async def test_headers_without_end_are_refused_by_their_size() -> None:
    async with connected() as (reader, writer):
        writer.write(LINE + b"x: " + b"y" * 70_000)
        assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 400")


def test_the_gateways_server_has_these_connections_and_logs_sparsely() -> None:
    http: Any = http_server(application, half_sent=HeldBytes()).config.http
    assert issubclass(http, DeadlineConnection)
    assert any(isinstance(each, SparseLog) for each in logging.getLogger("uvicorn.error").filters)


def test_one_text_is_logged_once_a_minute_and_errors_always() -> None:
    sparse = SparseLog()

    def passes(created_s: float, text: str, level: int = logging.WARNING) -> bool:
        record = logging.LogRecord("x", level, "", 0, text, None, None)
        record.created = created_s
        return bool(sparse.filter(record))

    bad = "Invalid HTTP request received."
    assert [passes(at, bad) for at in (0.0, 1.0, 59.0, 60.0, 61.0)] == [True, 0, 0, True, 0]
    assert passes(1.0, "another")
    assert passes(1.0, bad, logging.ERROR)


def test_bodies_count_beside_the_histories_until_they_are_answered() -> None:
    memory = BodyMemory(bytes_max=100, body_bytes_max=100, other_bytes=lambda: 40)
    with memory.body() as first:
        first.grow(50)
        with memory.body() as second:
            second.grow(5)
            with pytest.raises(RefusedError) as refused:
                second.grow(6)
        assert refused.value.status == 503
        assert memory.held_bytes == 50
    assert memory.held_bytes == 0


async def test_headers_count_until_they_are_whole_or_their_connection_is_gone() -> None:
    held, half = ShortDeadlines.half_sent, LINE + b"x: " + b"y" * 5000
    async with connected() as (reader, writer):
        writer.write(half)
        await asyncio.sleep(0.05)
        counted = held.total
        writer.write(b"\r\ncontent-length: 2\r\n\r\nok")
        await reader.readuntil(b"ok")
        assert held.total == 0
        writer.write(half)
        await asyncio.sleep(0.05)
        assert held.total == counted
        await reader.read()
    assert len(half) <= counted <= len(half) + 1000
    assert held.total == 0


async def test_many_short_headers_without_end_are_refused_for_the_objects_they_become() -> None:
    async with connected() as (reader, writer):
        writer.write(LINE + b"a:b\r\n" * 600)
        assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 400")


async def test_half_sent_headers_refuse_chat_and_neither_health_nor_the_end_of_an_episode(
    model: Path,
) -> None:
    log = MemoryLog(run="r", clock_ms=wall_ms)
    configuration = configuration_of(model)
    async with running(log.open, configuration, lambda _: "yes", memory_bytes_max=40_000) as (
        world,
        _,
    ):
        claim = await world.episode()
        port = int(world.base_url.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(LINE + b"x: " + b"y" * 50_000)
        await asyncio.sleep(0.1)
        with pytest.raises(openai.InternalServerError) as refused:
            await world.client(claim).chat.completions.create(
                model="m", messages=[{"role": "user", "content": "a"}]
            )
        health = await world.admin("GET", "/health")
        path = f"/v1/episodes/{claim['episode_id']}/finish"
        finished = await world.admin("POST", path, {"result": 1})
        writer.close()
    assert refused.value.status_code == 503
    assert (health.status_code, finished.status_code) == (200, 200)


async def test_headers_without_end_behind_a_body_are_refused_by_their_size() -> None:
    async with connected() as (reader, writer):
        writer.write(LINE + b"transfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n")
        writer.write(b"x: yyyyyyyyyyyyyyyy\r\n" * 5000)
        # The server may close before it has read all of it, which resets the connection.
        said = await asyncio.wait_for(reader.readline(), 5)
    assert said.startswith(b"HTTP/1.1 400")


async def test_many_connections_are_accepted_a_few_at_a_time() -> None:
    server = http_server(application, half_sent=HeldBytes())
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    clients = connections_to(listener, count=10 * ACCEPTED_AT_ONCE)
    serving = asyncio.create_task(serve_http(server, [listener]))
    counts = [0]
    while counts[-1] < len(clients):
        await asyncio.sleep(0)
        counts.append(len(server.server_state.connections))
    assert max(after - before for before, after in pairwise(counts)) == ACCEPTED_AT_ONCE
    for client in clients:
        client.close()
    server.should_exit = True
    await serving


async def test_many_connections_wait_however_few_are_accepted_at_once() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        acceptor = Acceptor(listener, asyncio.Protocol)
        for client in connections_to(listener, count=10 * ACCEPTED_AT_ONCE):
            client.close()
        acceptor.close()


class OneFailsFirst(socket.socket):
    """A socket whose first connection failed while it waited."""

    has_failed = False

    def accept(self) -> tuple[socket.socket, Any]:
        if not self.has_failed:
            self.has_failed = True
            raise OSError(errno.EPROTO, "protocol error")
        return super().accept()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_connection_sends_at_once_and_one_that_failed_holds_up_none(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def accepted() -> int:
        made: asyncio.Future[asyncio.BaseTransport] = asyncio.get_running_loop().create_future()

        class Made(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                made.set_result(transport)

        with OneFailsFirst(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
            listener.bind(("127.0.0.1", 0))
            acceptor = Acceptor(listener, Made)
            (client,) = connections_to(listener, count=1)
            transport = await asyncio.wait_for(made, 0.5)
            acceptor.close()
            client.close()
            server_side = transport.get_extra_info("socket")
            sends_at_once = server_side.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            transport.close()
            return int(sends_at_once)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(accepted()) == 1


async def test_a_connection_that_finds_no_file_is_accepted_when_there_is_one() -> None:
    made, made_one = [], asyncio.Event()

    class Made(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.append(transport)
            made_one.set()

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        (client,) = connections_to(listener, count=1)
        highest = max(int(each) for each in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, before[1]))
        fill = full_table()
        acceptor = Acceptor(listener, Made)
        await asyncio.sleep(0.1)
        held = len(made)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for each in fill:
            os.close(each)
        await asyncio.wait_for(made_one.wait(), 10)
        acceptor.close()
        client.close()
    made[0].close()
    assert (held, len(made)) == (0, 1)


def full_table() -> list[int]:
    """Open files until there is no room for another one."""
    files: list[int] = []
    with suppress(OSError):
        while True:
            files.append(os.dup(0))
    return files


def test_a_gateway_may_have_as_many_connections_as_the_hard_limit_of_files() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowered = before[1] - 1 if before[1] < 1 << 30 else 4096
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowered, before[1]))
    try:
        allow_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def connections_to(listener: socket.socket, *, count: int) -> list[socket.socket]:
    """Connections that wait in this socket's queue; a full queue raises TimeoutError."""
    return [socket.create_connection(listener.getsockname(), timeout=1) for _ in range(count)]
