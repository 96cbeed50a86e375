"""What passes a connection between two gateways: as it comes, in any order, however either ends."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from forgemq_contracts.ownership import PartitionOwner
from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.forwarding import Forwarder, OwnerGoneError
from forgemq_gateway.links import Links, request_head

HEAD_END = b"\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


# The gateway runs on uvloop, most of its tests on asyncio's loop.
pytestmark = pytest.mark.every_loop


class Owner:
    """A server that counts its connections."""

    def __init__(self, serve: Serve) -> None:
        self.connections = 0
        self.url = ""
        self._serve = serve

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self._serve(reader, writer)
        finally:
            writer.close()


@asynccontextmanager
async def owner_of(serve: Serve) -> AsyncIterator[Owner]:
    owner = Owner(serve)
    server = await asyncio.start_server(owner.accept, "127.0.0.1", 0, limit=1_000_000)
    owner.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with asyncio.timeout(10):
        yield owner
    server.close()


async def ask(
    forwarder: Forwarder,
    owner: Owner,
    *parts: bytes,
    headers: Sequence[tuple[bytes, bytes]] = (),
    send: Any = None,
    is_open: bool = False,
) -> list[Any]:
    """Send a request with a body in these parts on; `is_open`: another part never comes."""
    sent: list[Any] = []
    messages: list[MutableMapping[str, Any]] = [
        {"type": "http.request", "body": part, "more_body": is_open or number < len(parts)}
        for number, part in enumerate(parts, 1)
    ]

    async def receive() -> MutableMapping[str, Any]:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    async def keep(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {
        "method": "POST",
        "raw_path": b"/v1/x",
        "query_string": b"a=1",
        "headers": headers or [(b"content-length", b"%d" % sum(map(len, parts)))],
    }
    where = PartitionOwner(gateway="o", url=owner.url, partitions=(0,))
    gone = asyncio.get_running_loop().create_future()
    await forwarder.forward(scope, receive, send or keep, owner=where, gone=gone, said="7")
    return sent


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """The head and the body of the next request."""
    head = (await reader.readuntil(HEAD_END)).lower()
    if b"chunked" in head:
        return head, await reader.readuntil(b"0\r\n\r\n")
    size = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return head, await reader.readexactly(size)


def bodies(sent: Sequence[Any]) -> bytes:
    return b"".join(message.get("body", b"") for message in sent)


async def test_requests_one_after_the_other_pass_one_connection() -> None:
    asked: list[tuple[bytes, bytes]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            asked.append(await read_request(reader))
            writer.write(OK)

    async with owner_of(serve) as owner, Forwarder() as forwarder:
        answers = [await ask(forwarder, owner, b"one") for _ in range(3)]
    assert [bodies(sent) for sent in answers] == [b"ok"] * 3
    assert (owner.connections, [body for _, body in asked]) == (1, [b"one"] * 3)
    host = owner.url.removeprefix("http://").encode()
    assert asked[0][0] == (
        b"post /v1/x?a=1 http/1.1\r\nhost: %s\r\ncontent-length: 3\r\nx-forgemq-owner: 7\r\n\r\n"
        % host
    )


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
        OK + b"HTTP/1.1 200 OK\r\n",
    ],
)
async def test_a_connection_that_cannot_be_kept_is_not_used_again(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(answer)

    async with owner_of(serve) as owner, Forwarder() as forwarder:
        answers = [await ask(forwarder, owner, b"one") for _ in range(2)]
    assert ([bodies(sent) for sent in answers], owner.connections) == ([b"ok"] * 2, 2)


async def test_a_connection_that_was_idle_for_too_long_is_closed_by_a_request_to_another() -> None:
    has_ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(HEAD_END)
        writer.write(OK)
        await reader.read()
        has_ended.set()

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(HEAD_END)
        writer.write(OK)

    links = Links(connect_s=1.0, idle_s=0.0)
    async with owner_of(serve) as first, owner_of(other) as second:
        for owner in (first, second):
            async with links.to(owner.url) as link:
                link.begin(request_head("GET", owner.url, target=b"/", headers=()))
                while (await link.part())[1]:
                    pass
        await has_ended.wait()
    links.close()


async def test_a_connection_that_the_owner_closed_while_idle_is_not_used_again() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)

    async with owner_of(serve) as owner, Forwarder() as forwarder:
        for _ in range(2):
            assert bodies(await ask(forwarder, owner, b"one")) == b"ok"
            await asyncio.sleep(0.05)  # Until the end of the connection has come.
    assert owner.connections == 2


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_in_parts_arrives_whole(is_chunked: bool) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, body = await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))

    parts = [b"a" * 70_000, b"", b"b" * 300_000]
    headers = [(b"transfer-encoding", b"chunked")] if is_chunked else []
    async with owner_of(serve) as owner, Forwarder() as forwarder:
        sent = await ask(forwarder, owner, *parts, headers=headers)
    chunks = b"11170\r\n%s\r\n493e0\r\n%s\r\n0\r\n\r\n" % (parts[0], parts[2])
    assert bodies(sent) == (chunks if is_chunked else b"".join(parts))


async def test_a_refusal_before_the_end_of_the_body_reaches_the_client() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(HEAD_END)
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\n\r\nbig")
        await reader.read()

    async with owner_of(serve) as owner, Forwarder() as forwarder:
        for _ in range(2):
            sent = await ask(forwarder, owner, b"begin", is_open=True)
            assert (sent[0]["status"], bodies(sent)) == (413, b"big")
    assert owner.connections == 2


@pytest.mark.parametrize("behind", [b"", b"HTTP/1.1 200 OK\r\n\r\n"])
async def test_a_long_answer_at_the_end_of_a_connection_arrives_whole(behind: bytes) -> None:
    size = 3_000_000

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        head = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % size
        writer.write(head + b"x" * size + behind)
        await writer.drain()

    received = 0

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal received
        await asyncio.sleep(0.01)
        received += len(message.get("body", b""))

    async with owner_of(serve) as owner, Forwarder() as forwarder:
        await ask(forwarder, owner, b"one", send=send)
    assert received == size


@pytest.mark.slow
async def test_a_client_that_reads_slowly_slows_the_owner_down() -> None:
    size, written = 20_000_000, 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(size // 100_000):
            writer.write(b"x" * 100_000)
            await writer.drain()
            written += 100_000

    received, written_then = 0, 0

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal received, written_then
        if not received:
            await asyncio.sleep(0.3)
            written_then = written
        received += len(message.get("body", b""))

    async with owner_of(serve) as owner, Forwarder() as forwarder:
        await ask(forwarder, owner, b"one", send=send)
    assert received == size
    assert written_then < size // 2  # What fits into the buffers of both sockets.


async def test_an_answer_that_breaks_off_ends_without_its_end() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")

    async with owner_of(serve) as owner, Forwarder() as forwarder:
        sent = await ask(forwarder, owner, b"one")
    assert (bodies(sent), sent[-1]["more_body"]) == (b"half", True)


@pytest.mark.parametrize(
    "answer", [b"", b"SSH-2.0-x\r\n", b"HTTP/1.1 101 Up\r\nupgrade: x\r\n\r\n"]
)
async def test_an_owner_that_answers_no_http_went_away(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer)

    async with owner_of(serve) as owner, Forwarder() as forwarder:
        with pytest.raises(RefusedError) as refused:
            await ask(forwarder, owner, b"one")
    assert refused.value.status == 503


@pytest.mark.parametrize("was_read", [False, True])
async def test_a_request_whose_client_left_while_the_gateway_stood_still_is_not_sent_on(
    was_read: bool,
) -> None:
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await read_request(reader))[1])
        writer.write(OK)

    sockets = [socket.socket() for _ in range(2)]
    sockets[0].bind(("127.0.0.1", 0))
    sockets[0].listen()
    sockets[1].connect(sockets[0].getsockname())
    sockets[1].send(b"one")
    sockets[1].close()  # Request and end of the connection wait for the gateway together.
    accepted = sockets[0].accept()[0]
    sockets[0].close()
    came, left = asyncio.Event(), asyncio.Event()

    class Client(asyncio.Protocol):
        def data_received(self, _: bytes) -> None:
            came.set()

        def connection_lost(self, _: Exception | None) -> None:
            left.set()

    async def receive() -> MutableMapping[str, Any]:
        if was_read:
            await left.wait()
        if left.is_set():
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": b"one"}

    async def send(_: MutableMapping[str, Any]) -> None:
        raise AssertionError("nobody reads the answer")

    async with owner_of(serve) as owner, Forwarder() as forwarder:
        await ask(forwarder, owner, b"warm")
        asked.clear()
        scope = {
            "method": "POST",
            "raw_path": b"/",
            "query_string": b"",
            "headers": [(b"content-length", b"3")],
        }
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_accepted_socket(Client, accepted)
        await came.wait()
        await forwarder.forward(
            scope,
            receive,
            send,
            owner=PartitionOwner(gateway="o", url=owner.url, partitions=(0,)),
            gone=loop.create_future(),
            said="7",
            body=b"one" if was_read else None,
        )
        transport.close()
        await asyncio.sleep(0.05)
    assert asked == []


async def test_nothing_of_a_request_is_read_for_an_owner_that_is_not_there() -> None:
    async def serve(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        raise AssertionError("nobody connects")

    async with owner_of(serve) as owner:
        pass
    read: list[str] = []

    async def receive() -> MutableMapping[str, Any]:
        read.append("part")
        return {"type": "http.request", "body": b"one"}

    async with Forwarder() as forwarder:
        scope = {
            "method": "POST",
            "raw_path": b"/",
            "query_string": b"",
            "headers": [(b"content-length", b"3")],
        }
        gone = asyncio.get_running_loop().create_future()
        where = PartitionOwner(gateway="o", url=owner.url, partitions=(0,))
        with pytest.raises(OwnerGoneError):
            await forwarder.forward(scope, receive, None, owner=where, gone=gone, said="7")  # type: ignore[arg-type]
        assert (read, await forwarder.is_gone(owner.url)) == ([], True)


@pytest.mark.slow
async def test_an_owner_that_says_nothing_is_not_gone() -> None:
    async def serve(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with owner_of(serve) as owner, Forwarder() as forwarder:
        assert await forwarder.is_gone(owner.url) is False
