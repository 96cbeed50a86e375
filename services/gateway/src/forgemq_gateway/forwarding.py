"""Sends a request on to the gateway that owns its group, and the answer back, as it comes.

Neither the body nor the answer is read here: both pass in the pieces in which they come.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from types import TracebackType

from forgemq_contracts.ownership import PartitionOwner
from forgemq_gateway.core.errors import RefusedError, busy, invalid
from forgemq_gateway.links import (
    Header,
    Link,
    LinkLostError,
    LinkRefusedError,
    Links,
    request_head,
)
from forgemq_gateway.wire import ClientGoneError, Receive, Scope, Send

OWNER_HEADER = "x-forgemq-owner"
"""Number of the change of owners by which a gateway has chosen where to send a request on, with
proofs that a gateway says so."""

_CONNECT_S = 1.0
"""Replicas are near each other; a client that is held waits no longer than a few seconds in all."""

# Of one hop (RFC 9110, 7.6.1), or written again for the next one.
_HOP_HEADERS = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade"),
        *(b"transfer-encoding", b"host", b"expect", OWNER_HEADER.encode()),
    )
)


# A process that stood still finds requests whose clients have left meanwhile. The event loop reads
# the request in one step, in the next the end of the connection, and tells it in a third.
_STEPS_UNTIL_LEFT = 3


class OwnerGoneError(Exception):
    """Nobody listens at the owner's address; nothing of the request was sent."""


class Forwarder:
    """Connections to the other gateways of the run; use it as a context."""

    async def __aenter__(self) -> "Forwarder":
        """Open; connections are made as they are needed, and kept."""
        self._links = Links(connect_s=_CONNECT_S)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close all connections."""
        self._links.close()

    async def is_gone(self, url: str) -> bool:
        """Whether nobody listens there; a gateway that only does not answer is not gone."""
        try:
            async with asyncio.timeout(_CONNECT_S), self._links.to(url) as link:
                link.begin(request_head("GET", url, target=b"/live", headers=()))
                while (await link.part())[1]:
                    pass
        except LinkRefusedError:
            return True
        except (LinkLostError, TimeoutError):
            return False
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
        request, answer = (
            _Passed(receive, body, headers=scope["headers"]),
            _Answer(send, has_opened=has_opened),
        )
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
        head = _head_of(scope, owner=owner, said=said)
        try:
            async with self._links.to(owner.url) as link:
                await request.pass_on(link, head)
                await answer.pass_on(link)
                if request.has_more:  # Of no use to the owner, and no beginning of a request.
                    link.close()
        except LinkRefusedError as error:
            raise OwnerGoneError(owner.url) from error
        except LinkLostError as error:
            raise _gone(error) from error
        except ClientGoneError:
            return


def _head_of(scope: Scope, *, owner: PartitionOwner, said: str) -> bytes:
    """The head of a request as it is sent on.

    Raises:
        RefusedError: 400, the path would change the host that is asked.
    """
    target: bytes = scope["raw_path"]
    if not target.startswith(b"/"):
        raise invalid("the path must begin with /", param=None)
    if scope["query_string"]:
        target = b"%s?%s" % (target, scope["query_string"])
    headers = [*_headers(scope["headers"]), (OWNER_HEADER.encode(), said.encode())]
    return request_head(scope["method"], owner.url, target=target, headers=headers)


def _headers(raw: Sequence[Header]) -> list[Header]:
    """The headers that are for the owner too: not those of one hop, or named as such."""
    left_out = _HOP_HEADERS
    for name, value in raw:
        if name == b"connection":
            left_out |= {word.strip().lower() for word in value.split(b",")}
    kept = [header for header in raw if header[0] not in left_out]
    if not _is_chunked(raw):
        return kept
    # The length is that of each chunk.
    named = [header for header in kept if header[0] != b"content-length"]
    return [*named, (b"transfer-encoding", b"chunked")]


def _is_chunked(raw: Sequence[Header]) -> bool:
    return any(name == b"transfer-encoding" for name, _ in raw)


def _gone(error: Exception) -> RefusedError:
    """503 without an address: clients are to know no other gateway than the one they ask."""
    name = type(error).__name__
    return busy(f"the group's gateway went away: {name}; ask again", status=503)


class _Passed:
    """The body of a request that is sent on, and word of its client after that.

    Attributes:
        has_more: Whether some of the body is still to come.
    """

    def __init__(self, receive: Receive, body: bytes | None, *, headers: Sequence[Header]) -> None:
        self._receive = receive
        self._body = body
        self._is_chunked = _is_chunked(headers)
        self._has_ended = asyncio.Event()
        self._has_left = False
        self.has_more = self._is_chunked or any(name == b"content-length" for name, _ in headers)
        if body is not None or not self.has_more:
            self._has_ended.set()

    async def pass_on(self, link: Link, head: bytes) -> None:
        """Send the request until its answer begins.

        Raises:
            LinkLostError: the owner went away.
            ClientGoneError: the client did.
        """
        for _ in range(_STEPS_UNTIL_LEFT):
            await asyncio.sleep(0)
        first = await self._part() if self.has_more else b""
        link.begin(head + first)
        if self.has_more:
            await self._pass_on_rest(link)

    async def _pass_on_rest(self, link: Link) -> None:
        """As `pass_on`: an owner that refuses a request does so before it has all of its body."""
        sending = asyncio.ensure_future(self._send_rest(link))
        beginning = asyncio.ensure_future(link.headed())
        try:
            await asyncio.wait((sending, beginning), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            await beginning
        finally:
            sending.cancel()
            beginning.cancel()

    async def _send_rest(self, link: Link) -> None:
        while self.has_more:
            await link.drained()
            link.write(await self._part())

    async def _part(self) -> bytes:
        """The next part of the body, as it is written on a connection."""
        part, has_more = self._body, False
        if part is None:
            message = await self._receive()
            self._has_left = message["type"] == "http.disconnect"
            if self._has_left:
                self._has_ended.set()
                raise ClientGoneError
            part, has_more = message.get("body", b""), message.get("more_body", False)
        self.has_more = has_more
        if not has_more:
            self._has_ended.set()
        if not self._is_chunked:
            return part
        chunk = b"%x\r\n%s\r\n" % (len(part), part) if part else b""
        return chunk if has_more else chunk + b"0\r\n\r\n"

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

    async def pass_on(self, link: Link) -> None:
        """Send the owner's answer to the client, without its head if the client has one.

        If the owner dies within it, the answer ends without its end, as it would have there.

        Raises:
            LinkLostError: the owner went away before it answered.
            RefusedError: 503, the owner refuses what the client takes for begun.
        """
        head = await link.headed()
        if self.has_opened and head.status != HTTPStatus.OK:
            raise busy(f"the group's gateway says {head.status}", status=503)
        if not self.has_opened:
            self.has_opened = True
            headers = [each for each in head.headers if each[0].lower() not in _HOP_HEADERS]
            start = {"type": "http.response.start", "status": head.status, "headers": headers}
            await self._send(start)
        has_more = True
        with suppress(LinkLostError):
            while has_more:
                part, has_more = await link.part()
                await self._send(
                    {"type": "http.response.body", "body": part, "more_body": has_more}
                )
