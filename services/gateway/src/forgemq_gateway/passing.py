"""Serves a request here if this gateway owns its group, or sends it on to the owner.

The group is known from the key or the path, before any of the body is read; only a request for a
new group names it in its body.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple, TypeAlias

import msgspec
from msgspec import Struct

from forgemq_contracts.admin import BODY_BYTES_MAX
from forgemq_contracts.ownership import PartitionOwner
from forgemq_contracts.partitions import group_id
from forgemq_gateway.access import Access
from forgemq_gateway.context import GatewayContext
from forgemq_gateway.core.errors import MovedError, RefusedError, busy
from forgemq_gateway.forwarding import OWNER_HEADER, Forwarder, OwnerGoneError
from forgemq_gateway.whereabouts import Whereabouts
from forgemq_gateway.wire import Receive, Scope, Send, headers_of, read_body

Asked: TypeAlias = tuple[str | None, str]
"""The key and the path of a request."""

Serve: TypeAlias = Callable[[Scope, Receive, Send, Asked], Awaitable[None]]

_EPISODE = r"([a-z0-9-]{1,64})\.[0-9]{1,9}\.[0-9]{1,9}"
_KEY = re.compile(_EPISODE + r"\..+")
_ADMIN_PATH = re.compile(rf"/v1/(?:groups/([a-z0-9-]{{1,64}})|episodes/{_EPISODE})(?:/.*)?")
_GROUPS_PATH = "/v1/groups"

_NUMBER_DIGITS = 18


class _Named(Struct):
    """The fields that a group's id follows from."""

    domain: str
    idempotency_key: str


class Passing:
    """Asked for every request; with one gateway in the run it serves all of them here."""

    def __init__(
        self,
        forwarder: Forwarder,
        *,
        whereabouts: Whereabouts,
        access: Access,
        context: GatewayContext,
    ) -> None:
        self._forwarder = forwarder
        self._access = access
        self._whereabouts = whereabouts
        self._gateways = context.gateways
        self._run = context.configuration.run
        self._telemetry = context.telemetry

    async def serve(
        self, scope: Scope, receive: Receive, send: Send, serve: Serve, asked: Asked
    ) -> None:
        """Serve a request, here or at the owner of its group.

        Raises:
            RefusedError: 429 or 503, its group moves, or the owner went away.
        """
        group, receive = await self._group(scope, receive, asked)
        if group is None:
            await serve(scope, receive, send, asked)
            return
        request = _Request(scope, receive, send, _number_in(scope))
        if await self._is_passed(request, group):
            return
        try:
            await serve(scope, receive, send, asked)
        except MovedError as moved:
            await self._pass_begun(request, moved)

    async def _pass_begun(self, request: "_Request", moved: MovedError) -> None:
        """Send on a request whose group left while it waited here: its owner goes on with it."""
        try:
            if not await self._is_passed(request, moved.group_id, begun=moved):
                raise moved
        except RefusedError as error:
            if moved.refuse is None:
                raise
            await moved.refuse(error)

    async def _is_passed(
        self, request: "_Request", group: str, *, begun: MovedError | None = None
    ) -> bool:
        """Send a request on, unless this gateway owns its group; returns whether it was sent."""
        while True:
            owner = await self._whereabouts.owner(group, least=request.number)
            if owner is None:
                return False
            if request.number == self._gateways.owner:
                raise busy(
                    f"this is not the gateway {owner.gateway} at {owner.url}: "
                    "FORGEMQ_GATEWAY_PEER_URL of each gateway must lead to itself alone",
                    status=503,
                )
            self._telemetry.count("gateway.forwarded")
            try:
                await self._forward(request, owner, begun=begun)
            except OwnerGoneError:
                self._whereabouts.note_gone(owner)
            else:
                return True

    async def _forward(
        self, request: "_Request", owner: PartitionOwner, *, begun: MovedError | None
    ) -> None:
        """Send a request on; an owner that stands still is waited for until it is replaced."""
        has_opened = begun is not None and begun.has_opened

        async def send(message: MutableMapping[str, Any]) -> None:
            nonlocal has_opened
            has_opened = True
            await request.send(message)

        forwarding = asyncio.ensure_future(
            self._forwarder.forward(
                request.scope,
                request.receive,
                send,
                owner=owner,
                number=self._gateways.owner,
                body=None if begun is None else begun.body,
                has_opened=has_opened,
            )
        )
        leaving = asyncio.ensure_future(self._whereabouts.until_gone(owner))
        try:
            await asyncio.wait((forwarding, leaving), return_when=asyncio.FIRST_COMPLETED)
            if forwarding.done():
                forwarding.result()
            elif not has_opened:
                raise busy(f"the gateway at {owner.url} stands still: ask again", status=503)
        finally:
            forwarding.cancel()
            leaving.cancel()

    async def _group(
        self, scope: Scope, receive: Receive, asked: Asked
    ) -> tuple[str | None, Receive]:
        """The group that a request is about, if any, and from where its body is to be read."""
        key, path = asked
        found = _ADMIN_PATH.fullmatch(path) or _KEY.fullmatch(key or "")
        if found is not None:
            return next(filter(None, found.groups())), receive
        if path != _GROUPS_PATH or self._gateways.serves_all:
            return None, receive
        headers = headers_of(scope)
        self._access.check_admin(headers)
        body = await read_body(receive, bytes_max=BODY_BYTES_MAX, headers=headers)
        return self._named(body), _again(body, receive)

    def _named(self, body: bytes) -> str | None:
        """The group that this body asks for; None if it is wrong, which the route will say."""
        try:
            named = msgspec.json.decode(body, type=_Named)
        except (msgspec.DecodeError, RecursionError):
            return None
        return group_id(run=self._run, domain=named.domain, idempotency_key=named.idempotency_key)


class _Request(NamedTuple):
    """One connection, and the change of owners by which another gateway has sent it here."""

    scope: Scope
    receive: Receive
    send: Send
    number: int


def _number_in(scope: Scope) -> int:
    """The number in the header of another gateway; 0 if it comes from a client."""
    text = headers_of(scope).get(OWNER_HEADER, "")
    return int(text) if text.isdecimal() and len(text) < _NUMBER_DIGITS else 0


def _again(body: bytes, receive: Receive) -> Receive:
    """Gives the body that was read, and then what the connection gives."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> MutableMapping[str, Any]:
        return messages.pop() if messages else await receive()

    return receive_again
