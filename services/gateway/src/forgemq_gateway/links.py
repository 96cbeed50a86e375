"""Connections to the run's other gateways, which requests and answers pass as they come.

A general client builds each request from parts and each answer into an object. For a request that
is only sent on this is work as long as all the rest of it, so here heads stay bytes and pairs of
bytes from one connection to the other.
"""

import asyncio
import ssl
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from http import HTTPStatus
from typing import TypeAlias, cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser
from msgspec import Struct

Header: TypeAlias = tuple[bytes, bytes]

# The gateway there closes a connection that is idle for 120 s (http_server.py): none is used that
# it may be about to close.
_IDLE_S = 60.0

# What waits for a client that reads slowly, before the gateway there is slowed down too.
_WAITING_BYTES_MAX = 65_536


class LinkLostError(Exception):
    """The connection ended before the answer did, or what came is no HTTP."""


class LinkRefusedError(LinkLostError):
    """Nobody listens at the other end; nothing was sent."""


class Head(Struct, frozen=True):
    """The beginning of an answer."""

    status: int
    headers: list[Header]


class Link(asyncio.Protocol):
    """One connection, for one request after the other.

    Attributes:
        head: Of the answer to the last request, as soon as it is there.
        has_ended: Whether all of that answer has come.
    """

    def __init__(self) -> None:
        self.head: Head | None = None
        self.has_ended = True
        self._is_kept = True
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._lost: LinkLostError | None = None
        self._headers: list[Header] = []
        self._parts: list[bytes] = []
        self._waiting_bytes = 0
        self._reader: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._parser = HttpResponseParser(self)

    def is_reusable(self) -> bool:
        """Whether another request can follow."""
        return self._lost is None and self.has_ended and self._is_kept

    def begin(self, data: bytes) -> None:
        """Send the head of a request, and what there is of its body."""
        self._parser = HttpResponseParser(self)
        self.head, self.has_ended, self._headers = None, False, []
        self.write(data)

    def write(self, data: bytes) -> None:
        """Send more of the request; after the connection is lost it goes nowhere."""
        if self._lost is None and self._transport is not None:
            self._transport.write(data)

    async def drained(self) -> None:
        """Return when the gateway there has read most of what was sent, or is lost."""
        if self._writable is not None:
            await self._writable

    async def headed(self) -> Head:
        """The beginning of the answer.

        Raises:
            LinkLostError: it did not come.
        """
        while self.head is None:
            await self._news()
        return self.head

    async def part(self) -> tuple[bytes, bool]:
        """The next part of the answer's body, b"" at an end without one; and whether more follows.

        Raises:
            LinkLostError: the answer did not end.
        """
        while not self._parts and not self.has_ended:
            await self._news()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        if self._waiting_bytes > _WAITING_BYTES_MAX:
            self._read_on(is_wanted=True)
        self._parts, self._waiting_bytes = [], 0
        return data, not self.has_ended

    async def _news(self) -> None:
        if self._lost is not None:
            raise self._lost
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def close(self) -> None:
        """Close the connection at once."""
        self._lost = self._lost or LinkLostError("closed")
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it.

    def data_received(self, data: bytes) -> None:
        """Read a part of an answer; a byte that nobody asked for ends the connection."""
        if self.has_ended:
            self._lose("an answer to no request")
            return
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._lose(f"no answer in HTTP: {error}")
        if self._waiting_bytes > _WAITING_BYTES_MAX:
            self._read_on(is_wanted=False)
        self._wake()

    def _read_on(self, *, is_wanted: bool) -> None:
        """Let more of the answer come, or not; a lost connection would refuse both."""
        if self._lost is not None or self._transport is None:
            return
        if is_wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def eof_received(self) -> None:
        """Nothing more comes, so the connection is closed."""
        self._lost = self._lost or LinkLostError("ended")

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell who waits for the answer, or for room to write."""
        if self._lost is None:
            self._lost = LinkLostError("closed" if exc is None else f"{type(exc).__name__}: {exc}")
        self.resume_writing()
        self._wake()

    def pause_writing(self) -> None:
        """Let who writes wait."""
        if self._writable is None:
            self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        """Let who writes go on."""
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    def on_message_begin(self) -> None:
        """Refuse what follows the answer."""
        if self.has_ended:
            raise ValueError("an answer to no request")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; those behind a chunked body are not passed on."""
        if self.head is None:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The head is there."""
        # Not known behind the answer.
        self._is_kept = bool(self._parser.should_keep_alive())
        status = self._parser.get_status_code()
        if status < HTTPStatus.OK:  # No request asks for another protocol, or before its body.
            raise ValueError(f"status {status} is no answer")
        self.head = Head(status, self._headers)

    def on_body(self, body: bytes) -> None:
        """Keep a part of the body until it is asked for."""
        self._parts.append(body)
        self._waiting_bytes += len(body)

    def on_message_complete(self) -> None:
        """The answer has ended."""
        self.has_ended = True

    def _lose(self, why: str) -> None:
        self._lost = self._lost or LinkLostError(why)
        self.close()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Links:
    """Connections by the URL they lead to; those that are idle are used again for a while.

    Gateways come and go under new URLs for as long as a run lasts: each request first closes what
    has been idle for too long, whomever it leads to.
    """

    def __init__(self, *, connect_s: float, idle_s: float = _IDLE_S) -> None:
        self._connect_s = connect_s
        self._idle_s = idle_s
        # The one that was used last is at the end.
        self._idle: defaultdict[str, deque[tuple[float, Link]]] = defaultdict(deque)
        self._is_closed = False

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """Of all connections: to read the authorities of this machine takes 20 ms."""
        return ssl.create_default_context()

    @asynccontextmanager
    async def to(self, url: str) -> AsyncIterator[Link]:
        """A connection for one request; closed behind it, unless it can be used again.

        Raises:
            LinkRefusedError: nobody listens there.
            LinkLostError: there is no connection, or not in time.
        """
        link = self._kept(url) or await self._connected(url)
        is_over = False
        try:
            yield link
            is_over = True
        finally:
            if is_over and link.is_reusable() and not self._is_closed:
                self._idle[url].append((asyncio.get_running_loop().time(), link))
            else:
                link.close()

    def _kept(self, url: str) -> Link | None:
        """The connection that was used last, so that those which are not needed grow old."""
        self._close_old()
        idle = self._idle.get(url)
        while idle:
            _, link = idle.pop()
            if link.is_reusable():
                return link
            link.close()
        return None

    def _close_old(self) -> None:
        oldest_s = asyncio.get_running_loop().time() - self._idle_s
        for url, idle in list(self._idle.items()):
            while idle and idle[0][0] <= oldest_s:
                idle.popleft()[1].close()
            if not idle:
                del self._idle[url]

    async def _connected(self, url: str) -> Link:
        parts = urlsplit(url)
        is_secret = parts.scheme == "https"
        loop, number = asyncio.get_running_loop(), parts.port or (443 if is_secret else 80)
        try:
            async with asyncio.timeout(self._connect_s):
                _, link = await loop.create_connection(
                    Link, parts.hostname or "", number, ssl=self._tls if is_secret else None
                )
        except ConnectionRefusedError as error:
            raise LinkRefusedError(str(error)) from error
        except OSError as error:
            raise LinkLostError(f"{type(error).__name__}: {error}") from error
        return link

    def close(self) -> None:
        """Close all that are idle, and each other one behind its request."""
        self._is_closed = True
        for idle in self._idle.values():
            for _, link in idle:
                link.close()
        self._idle.clear()


def request_head(method: str, url: str, *, target: bytes, headers: Sequence[Header]) -> bytes:
    """The head of a request to what is at this path and query below the URL."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    lines = b"".join(b"%s: %s\r\n" % header for header in headers)
    path = parts.path.rstrip("/").encode() + target
    return b"%s %s HTTP/1.1\r\nhost: %s\r\n%s\r\n" % (method.encode(), path, host.encode(), lines)
