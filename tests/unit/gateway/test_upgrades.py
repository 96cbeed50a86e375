"""Requests that offer another protocol: they are served as if they did not, their bodies too.

Java's HTTP client offers HTTP/2 with its first request on every connection without TLS.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import orjson
import pytest

from forgemq_gateway.core.held_bytes import HeldBytes
from forgemq_gateway.http_server import http_server, serve_http
from forgemq_gateway.wire import Receive, Scope, Send, read_body, send_json

OFFER = (
    b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
    b"http2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
)
LINE = b"POST /v1/x?y=1 HTTP/1.1\r\nhost: here\r\n"
SIZED = LINE + OFFER + b"content-length: 5\r\n\r\nfirst"
CHUNKED = LINE + OFFER + b"transfer-encoding: chunked\r\n\r\n3\r\nfir\r\n2\r\nst\r\n0\r\n\r\n"
PLAIN = LINE + b"content-length: 6\r\n\r\nsecond"


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with what has come of the request."""
    body = await read_body(receive, bytes_max=1 << 20, headers={})
    names = [name.decode() for name, _ in scope["headers"]]
    said = [scope["method"], scope["path"], scope["query_string"].decode(), names, body.decode()]
    await send_json(send, said)


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    server = http_server(application, half_sent=HeldBytes())
    serving = asyncio.create_task(serve_http(server, [listener]))
    reader, writer = await asyncio.open_connection(*address)
    try:
        yield reader, writer
    finally:
        writer.close()
        server.should_exit = True
        await serving


async def answers(reader: asyncio.StreamReader, count: int) -> list[list[object]]:
    found = []
    for _ in range(count):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert head.startswith(b"HTTP/1.1 200 ")
        size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        found.append(orjson.loads(await reader.readexactly(size)))
    return found


def said(body: str, *more: str) -> list[object]:
    return ["POST", "/v1/x", "y=1", ["host", *more], body]


@pytest.mark.parametrize("pieces_bytes", [1, 64, 10_000])
async def test_a_body_is_read_whatever_protocol_its_request_offers(pieces_bytes: int) -> None:
    sent = SIZED + PLAIN + CHUNKED + PLAIN
    async with connected() as (reader, writer):
        for start in range(0, len(sent), pieces_bytes):
            writer.write(sent[start : start + pieces_bytes])
            await asyncio.sleep(0)
        first, second, third, fourth = await answers(reader, 4)
    offered = ("connection", "http2-settings")
    assert first == said("first", *offered, "content-length")
    assert third == said("first", *offered, "transfer-encoding")
    assert second == fourth == said("second", "content-length")


async def test_a_websocket_is_answered_as_any_request() -> None:
    offer = b"connection: upgrade\r\nupgrade: websocket\r\n\r\n"
    async with connected() as (reader, writer):
        writer.write(b"GET /v1/x?y=1 HTTP/1.1\r\nhost: here\r\n" + offer + PLAIN)
        first, second = await answers(reader, 2)
    assert first == ["GET", "/v1/x", "y=1", ["host", "connection"], ""]
    assert second == said("second", "content-length")


@pytest.mark.parametrize(
    "sent",
    [b"CONNECT here:1 HTTP/1.1\r\nhost: here\r\n\r\n", b"CONNECT here:1 HTTP/1.1\r\n" + OFFER],
)
async def test_a_request_for_a_tunnel_is_refused(sent: Sequence[int]) -> None:
    async with connected() as (reader, writer):
        writer.write(bytes(sent) + b"\r\n")
        assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 400 ")
