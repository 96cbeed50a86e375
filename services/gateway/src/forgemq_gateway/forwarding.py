"""Sends a request on to the gateway that owns its group, and the answer back, as it comes.

Neither the body nor the answer is read here: both pass in the pieces in which they come.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from http import HTTPStatus
from types import TracebackType

import aiohttp
from yarl import URL

from forgemq_contracts.ownership import PartitionOwner
from forgemq_gateway.core.errors import RefusedError, busy, invalid
from forgemq_gateway.wire import ClientGoneError, Receive, Scope, Send

OWNER_HEADER = "x-forgemq-owner"
"""Number of the change of owners by which a gateway has chosen where to send a request on, with
proofs that a gateway says so."""

_CONNECT_S = 1.0
"""Replicas are near each other; a client that is held waits no longer than a few seconds in all."""

# Of one hop (RFC 9110, 7.6.1), or set again by the client below.
_HOP_HEADERS = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade"),
        *(b"transfer-encoding", b"host", b"expect", OWNER_HEADER.encode()),
    )
)

# What the client below would add of its own.
_AUTO_HEADERS = ("accept", "accept-encoding", "content-type", "user-agent")


class OwnerGoneError(Exception):
    """Nobody listens at the owner's address; nothing of the request was sent."""


class Forwarder:
    """Connections to the other gateways of the run; use it as a context."""

    async def __aenter__(self) -> "Forwarder":
        """Open; connections are made as they are needed, and kept."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close all connections."""
        await self._session.close()

    async def is_gone(self, url: str) -> bool:
        """Whether nobody listens there; a gateway that only does not answer is not gone."""
        try:
            async with self._session.get(f"{url}/live", timeout=_within(_CONNECT_S)):
                return False
        except aiohttp.ClientConnectorError as error:
            return _is_refused(error)
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def forward(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        owner: PartitionOwner,
        gone: "asyncio.Future[None]",
        said: str,
        body: bytes | None = None,
        has_opened: bool = False,
    ) -> None:
        """Let the owner answer this request.

        Args:
            scope: Of the request; its path is the one that the client sent.
            receive: Gives the body, or only the end of the connection if `body` is given.
            send: To the client.
            owner: Who is to answer.
            gone: Ends when the owner is there no more, also if its connections stay open.
            said: Value of `OWNER_HEADER`.
            body: Of the request, if it was read here.
            has_opened: Whether the client has had the head of a stream.

        Raises:
            OwnerGoneError: nobody listens there. Nothing was sent, and no body was read.
            RefusedError: 503, the owner went away before it answered.
        """
        request, answer = _Passed(receive, body), _Answer(send, has_opened=has_opened)
        leaving = asyncio.ensure_future(request.left())
        passing = asyncio.ensure_future(
            self._passed(scope, request, answer, owner=owner, said=said)
        )
        try:
            await asyncio.wait((leaving, passing, gone), return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                passing.result()
            elif gone.done() and not answer.has_opened:
                raise busy("the group's gateway stands still: ask again", status=503)
        finally:
            leaving.cancel()
            passing.cancel()

    async def _passed(
        self,
        scope: Scope,
        request: "_Passed",
        answer: "_Answer",
        *,
        owner: PartitionOwner,
        said: str,
    ) -> None:
        """As `forward`."""
        try:
            response = await self._asked(scope, request, owner=owner, said=said)
        except aiohttp.ClientError as error:
            if _is_refused(error):
                raise OwnerGoneError(owner.url) from error
            raise _gone(error) from error
        async with response:
            if answer.has_opened and response.status != HTTPStatus.OK:
                raise busy(f"the group's gateway says {response.status}", status=503)
            # If the owner dies now, the answer ends here without its end, as it would have there.
            with suppress(aiohttp.ClientError):
                await answer.pass_on(response)

    async def _asked(
        self,
        scope: Scope,
        request: "_Passed",
        *,
        owner: PartitionOwner,
        said: str,
    ) -> aiohttp.ClientResponse:
        raw = scope["raw_path"].decode("latin-1")
        if not raw.startswith("/"):  # It would change the host that is asked.
            raise invalid("the path must begin with /", param=None)
        query = scope["query_string"].decode("latin-1")
        has_body = _has_body(scope["headers"])
        if not has_body:
            request.end()
        return await self._session.request(
            scope["method"],
            URL(f"{owner.url}{raw}{'?' if query else ''}{query}", encoded=True),
            headers=[*_headers(scope["headers"]), (OWNER_HEADER, said)],
            skip_auto_headers=_AUTO_HEADERS,
            data=request.parts() if has_body else None,
            allow_redirects=False,
        )


def _is_refused(error: aiohttp.ClientError) -> bool:
    """Whether the other machine says that nobody listens there; a fault of this one is no word."""
    return isinstance(error, aiohttp.ClientConnectorError) and isinstance(
        error.os_error, ConnectionRefusedError
    )


def _within(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds)


def _gone(error: Exception) -> RefusedError:
    """503 without an address: clients are to know no other gateway than the one they ask."""
    name = type(error).__name__
    return busy(f"the group's gateway went away: {name}; ask again", status=503)


def _headers(raw: Sequence[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """The headers that are for the owner too: not those of one hop, or named as such."""
    left_out = _HOP_HEADERS | {
        word.strip().lower()
        for name, value in raw
        if name == b"connection"
        for word in value.split(b",")
    }
    if any(name == b"transfer-encoding" for name, _ in raw):  # The length is that of each chunk.
        left_out |= {b"content-length"}
    return [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in raw
        if name not in left_out
    ]


def _has_body(raw: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name in (b"content-length", b"transfer-encoding") for name, _ in raw)


class _Passed:
    """The body of a request that is sent on, and word of its client after that."""

    def __init__(self, receive: Receive, body: bytes | None) -> None:
        self._receive = receive
        self._body = body
        self._has_ended = asyncio.Event()
        self._has_left = False

    async def parts(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        if self._body is not None:
            yield self._body
            self._has_ended.set()
            return
        while True:
            message = await self._receive()
            self._has_left = message["type"] == "http.disconnect"
            if self._has_left:
                self._has_ended.set()
                raise ClientGoneError
            if part := message.get("body", b""):
                yield part
            if not message.get("more_body", False):
                self._has_ended.set()
                return

    def end(self) -> None:
        """Note that the request has no body."""
        self._has_ended.set()

    async def left(self) -> None:
        """Return when the client has left; nobody else may ask for messages after the body."""
        await self._has_ended.wait()
        while not self._has_left:
            self._has_left = (await self._receive())["type"] == "http.disconnect"


class _Answer:
    """What the client gets.

    Attributes:
        has_opened: Whether it has had a head.
    """

    def __init__(self, send: Send, *, has_opened: bool) -> None:
        self._send = send
        self.has_opened = has_opened

    async def pass_on(self, response: aiohttp.ClientResponse) -> None:
        """Send the owner's answer to the client, without its head if the client has one.

        Raises:
            aiohttp.ClientError: the owner went away.
        """
        if not self.has_opened:
            self.has_opened = True
            raw = response.raw_headers
            headers = [each for each in raw if each[0].lower() not in _HOP_HEADERS]
            start = {"type": "http.response.start", "status": response.status, "headers": headers}
            await self._send(start)
        has_more = True
        while has_more:
            part = await response.content.readany()
            has_more = not response.content.at_eof()
            await self._send({"type": "http.response.body", "body": part, "more_body": has_more})
