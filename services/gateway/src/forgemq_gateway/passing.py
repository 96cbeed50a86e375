"""Serves a request here if this gateway owns its group, or sends it on to the owner.

The group is known from the key or the path, before any of the body is read; only a request for a
new group names it in its body. A live key stands for all groups in one partition.
"""

import re
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from http import HTTPStatus
from typing import Any, NamedTuple, TypeAlias

import msgspec
from msgspec import Struct

from forgemq_contracts.admin import BODY_BYTES_MAX
from forgemq_contracts.half_pairs import without_halves
from forgemq_contracts.ownership import PartitionOwner
from forgemq_contracts.partitions import group_id
from forgemq_gateway.access import Access
from forgemq_gateway.context import GatewayContext
from forgemq_gateway.core.errors import MovedError, RefusedError, busy
from forgemq_gateway.core.forwards import Forwards
from forgemq_gateway.forwarding import OWNER_HEADER, Forwarder, OwnerGoneError
from forgemq_gateway.whereabouts import Whereabouts
from forgemq_gateway.wire import Receive, Scope, Send, headers_of, read_again, read_body


class KeyedPath(NamedTuple):
    """What a request asks for: its key, if it has one, and its path without the key."""

    key: str | None
    path: str


Serve: TypeAlias = Callable[[Scope, Receive, Send, KeyedPath], Awaitable[None]]

_EPISODE = r"([a-z0-9-]{1,64})\.[0-9]{1,9}\.[0-9]{1,9}"
_KEY = re.compile(_EPISODE + r"\..+")
_ADMIN_PATH = re.compile(rf"/v1/(?:groups/([a-z0-9-]{{1,64}})|episodes/{_EPISODE})(?:/.*)?")
_GROUPS_PATH = "/v1/groups"

_GONE_MAX = 5
"""Owners in turn at which nobody listens: one that says it is there meanwhile is asked again."""

_MOVES_MAX = 3
"""Owners of one request after the first; a group moves rarely, and the client can ask again."""


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
        forwards: Forwards,
        context: GatewayContext,
    ) -> None:
        self._forwards = forwards
        self._forwarder = forwarder
        self._access = access
        self._whereabouts = whereabouts
        self._gateways = context.gateways
        self._run = context.configuration.run
        self._telemetry = context.telemetry

    async def serve(
        self, scope: Scope, receive: Receive, send: Send, serve: Serve, asked: KeyedPath
    ) -> None:
        """Serve a request, here or at the owner of its group.

        Raises:
            RefusedError: 429 or 503, its group moves, or the owner went away.
        """
        group, receive = await self._group(scope, receive, asked)
        if group is None:
            await serve(scope, receive, send, asked)
            return
        number = self._access.unsealed(headers_of(scope).get(OWNER_HEADER, ""))
        key = None if _is_admin_path(asked.path) else asked.key
        request = _Request(scope, receive, send, number, key)
        if await self._is_passed(request, group):
            return
        try:
            await serve(scope, receive, send, asked)
        except MovedError as moved:
            await self._go_on(request, moved, serve=serve, asked=asked)

    async def _go_on(
        self, request: "_Request", moved: MovedError, *, serve: Serve, asked: KeyedPath
    ) -> None:
        """Serve a request whose group left while it waited here: at its owner, or here again."""
        try:
            for _ in range(_MOVES_MAX):
                if await self._is_passed(request, moved.group_id, begun=moved):
                    return
                try:
                    await serve(request.scope, *_begun(request, moved), asked)
                except MovedError as again:
                    moved = _later(moved, again)
                else:
                    return
            raise moved
        except RefusedError as error:
            if moved.refuse is None:
                raise
            await moved.refuse(error)

    async def _is_passed(
        self, request: "_Request", group: str, *, begun: MovedError | None = None
    ) -> bool:
        """Send a request on, unless this gateway owns its group; returns whether it was sent."""
        for _ in range(_GONE_MAX):
            owner = await self._whereabouts.owner(request.scope, group, least=request.number)
            if owner is None:
                return False
            if request.number == self._gateways.owner:
                raise self._mistaken(owner)
            self._telemetry.count("gateway.forwarded")
            try:
                with self._place(request, owner):
                    await self._forward(request, owner, begun=begun)
            except OwnerGoneError:
                self._whereabouts.note_gone(owner)
            else:
                return True
        raise busy("the group's gateway takes no connection: ask again", status=503)

    def _mistaken(self, owner: PartitionOwner) -> RefusedError:
        """503: another gateway took this one for the owner; the message names no address."""
        self._telemetry.event("taken_for_another", gateway=owner.gateway)
        return busy(
            "this gateway was taken for another one: FORGEMQ_GATEWAY_PEER_URL of each gateway "
            "must lead to itself alone",
            status=503,
        )

    def _place(self, request: "_Request", owner: PartitionOwner) -> AbstractContextManager[None]:
        """Within it a request that is sent on is counted, unless it has the admin key."""
        if request.key is None:
            return nullcontext()
        is_proven = self._access.is_proven_key(request.key)
        return self._forwards.place(owner.gateway, is_proven=is_proven)

    async def _forward(
        self, request: "_Request", owner: PartitionOwner, *, begun: MovedError | None
    ) -> None:
        """Send a request on; an owner that stands still is waited for until it is replaced."""
        try:
            with self._whereabouts.leaving(owner) as gone:
                await self._forwarder.forward(
                    request.scope,
                    request.receive,
                    request.send,
                    owner=owner,
                    gone=gone,
                    said=self._access.sealed(self._gateways.owner),
                    body=None if begun is None else begun.body,
                    has_opened=begun is not None and begun.has_opened,
                )
        except RefusedError as error:
            failed = f"{error.message} ({error.__cause__})"
            self._telemetry.event("forward_failed", gateway=owner.gateway, error=failed)
            raise

    async def _group(
        self, scope: Scope, receive: Receive, asked: KeyedPath
    ) -> tuple[str | None, Receive]:
        """The group that a request is about, if any, and from where its body is to be read."""
        key, path = asked
        if _is_admin_path(path) and not self._access.is_admin(headers_of(scope)):
            return None, receive  # Refused here: nothing is sent on for who has no admin key.
        caller = self._access.live_caller(key, scope)
        if caller is not None and not _is_admin_path(path):
            return caller.home, receive
        found = _ADMIN_PATH.fullmatch(path) or _KEY.fullmatch(key or "")
        if found is not None:
            return next(filter(None, found.groups())), receive
        if path != _GROUPS_PATH or self._gateways.serves_all:
            return None, receive
        headers = headers_of(scope)
        self._access.check_admin(headers)
        body = await read_body(receive, bytes_max=BODY_BYTES_MAX, headers=headers)
        return self._named(body), read_again(body, receive)

    def _named(self, body: bytes) -> str | None:
        """The group that this body asks for; None if it is wrong, which the route will say."""
        try:
            named = msgspec.json.decode(without_halves(body), type=_Named)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return group_id(run=self._run, domain=named.domain, idempotency_key=named.idempotency_key)


class _Request(NamedTuple):
    """One connection.

    Attributes:
        number: The change of owners by which another gateway has sent it here; 0: a client did.
        key: Of an episode, or a live one; None if it carries the admin key.
    """

    scope: Scope
    receive: Receive
    send: Send
    number: int
    key: str | None


def _is_admin_path(path: str) -> bool:
    """Whether a path is of the admin API and about one group."""
    return path == _GROUPS_PATH or _ADMIN_PATH.fullmatch(path) is not None


def _begun(request: _Request, moved: MovedError) -> tuple[Receive, Send]:
    """The connection of a request to be served once more here, as one that has just come."""
    body = moved.body
    receive = request.receive if body is None else read_again(body, request.receive)
    if not moved.has_opened:
        return receive, request.send

    async def send_on(message: MutableMapping[str, Any]) -> None:
        if message["type"] != "http.response.start":
            await request.send(message)
        elif message["status"] != HTTPStatus.OK:
            raise busy(f"the group's gateway says {message['status']}", status=503)

    return receive, send_on


def _later(moved: MovedError, again: MovedError) -> MovedError:
    """Where a request stands that moved once more; what its client had at first, it still has."""
    again.body = moved.body if again.body is None else again.body
    if moved.has_opened:
        again.has_opened, again.refuse = True, moved.refuse
    return again
