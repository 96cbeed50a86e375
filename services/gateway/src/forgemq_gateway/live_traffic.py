"""Serves the callers of live keys: finds or opens the episode of a request, then goes on as ever.

A request without a session says by its body alone which conversation it goes on with. So its body
is read here, and read again from memory where those of claimed episodes are.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

from forgemq_bus.errors import FINAL_ERRORS, LogError
from forgemq_contracts.groups import RequestedGroup
from forgemq_contracts.partitions import live_group_id
from forgemq_gateway.access import Access
from forgemq_gateway.body_memory import BodyMemory
from forgemq_gateway.context import GatewayContext
from forgemq_gateway.core.choices import check_choices
from forgemq_gateway.core.episodes import HeldEpisode
from forgemq_gateway.core.errors import MovedError, busy, log_refuses
from forgemq_gateway.core.group import Group
from forgemq_gateway.core.live import LiveCaller, OpenConversations, continued, live_task
from forgemq_gateway.holding import Hold
from forgemq_gateway.large_work import LargeWork
from forgemq_gateway.openings import FreeEpisode, Openings
from forgemq_gateway.wire import (
    ClientGoneError,
    Receive,
    Scope,
    Send,
    headers_of,
    read_again,
)
from forgemq_gateway.wire_protocol import WireProtocol

Serve: TypeAlias = Callable[[Scope, Receive, Send, HeldEpisode], Awaitable[None]]

EPISODE_HEADER = "x-forgemq-episode"
"""Of answers to callers of live keys: rewards are reported for this id."""


class LiveTraffic:
    """Finds the episode of each request with a live key.

    A conversation is a group of one: it is requested, admitted and retired as every evaluation,
    and numbered for each key and partition, so that its idempotency keys take no room.
    """

    def __init__(
        self, *, access: Access, openings: Openings, memory: BodyMemory, context: GatewayContext
    ) -> None:
        self._access = access
        self._openings = openings
        self._memory = memory
        self._configuration = context.configuration
        self._settings = context.settings
        self._hold = Hold(context.settings.lane_hold_s, clock=context.clock)
        self._gateways = context.gateways
        self._registry = context.registry
        self._outbox = context.outbox
        self._changed = context.changed
        self._clock = context.clock
        self._work = LargeWork("live")
        # By source: one after the last number that this process has asked for.
        self._numbers: dict[str, int] = {}
        # Groups that a request waits for, requested or about to be, and the names of their keys.
        self._taken: dict[str, str] = {}
        # Episodes whose request is on its way through the route, and how many there are.
        self._in_use: Counter[str] = Counter()
        self._sessions: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def serve(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        caller: LiveCaller,
        *,
        protocol: WireProtocol,
        route: Serve,
    ) -> None:
        """Serve one request in the episode that it belongs to.

        Raises:
            RefusedError: 4xx as the protocol and the key's limits say; 503, no engine serves.
        """
        self._access.check_here(caller.home)
        if caller.session:
            episode = await self._of_session(caller, scope)
            with self._routed(episode):
                await route(scope, receive, _named(send, episode), episode)
            return
        body = b""
        try:
            with self._memory.body() as counted:  # Until the route reads it, and counts it then.
                body = await counted.read(receive, headers=headers_of(scope))
                episode = await self._of_body(caller, body, scope, protocol)
            with self._routed(episode):
                await route(scope, read_again(body, receive), _named(send, episode), episode)
        except ClientGoneError:
            return
        except MovedError as error:
            error.body = body if error.body is None else error.body
            raise

    async def _of_session(self, caller: LiveCaller, scope: Scope) -> HeldEpisode:
        """The open episode of the session; its first requests may come at once, and open one."""
        alone = self._sessions.setdefault(caller.home, asyncio.Lock())
        with self._hold.waiting(scope) as left_s:
            try:
                async with asyncio.timeout(left_s):
                    await alone.acquire()
            except TimeoutError:
                why = "another request still opens this conversation: ask again"
                raise busy(why, status=503) from None
        try:
            found = next(self._open_episodes(caller), None)
            return found or await self._opened(caller, scope)
        finally:
            alone.release()

    async def _of_body(
        self, caller: LiveCaller, body: bytes, scope: Scope, protocol: WireProtocol
    ) -> HeldEpisode:
        """The episode that this body goes on with, or a new one."""
        said = OpenConversations(list(self._open_episodes(caller)))
        request = await self._work.run(lambda: protocol.read(body, said), size=len(body))
        check_choices(request, choices_max=self._settings.choices_max)
        # Anew: others may have opened or ended meanwhile.
        episodes = list(self._open_episodes(caller))
        found = continued(request, episodes, headers=headers_of(scope))
        return found or self._unused(caller) or await self._opened(caller, scope)

    @contextmanager
    def _routed(self, episode: HeldEpisode) -> Iterator[None]:
        """Within it the episode is in use, also before its request is read."""
        self._in_use[episode.episode_id] += 1
        try:
            yield
        finally:
            self._in_use[episode.episode_id] -= 1
            self._in_use = +self._in_use

    def _unused(self, caller: LiveCaller) -> HeldEpisode | None:
        """An open episode of the key whose requests were all refused, and would keep its place."""
        return next(
            (
                each
                for each in self._open_episodes(caller)
                if each.is_unused
                and each.episode_id not in self._in_use
                and each.opened.group_id not in self._taken
            ),
            None,
        )

    def _open_episodes(self, caller: LiveCaller) -> Iterator[HeldEpisode]:
        for group in self._groups(caller):
            episode = group.episodes.get(0)
            if episode is None or episode.is_closed or group.closed:
                continue
            is_here = self._gateways.serves(group.facts.group_id)
            if is_here and episode.opened.session == caller.session:
                yield episode

    def _groups(self, caller: LiveCaller) -> list[Group]:
        """The groups of the key that are not over, those of other gateways too."""
        return [each for each in self._registry.groups.values() if caller.has(each.facts)]

    async def _opened(self, caller: LiveCaller, scope: Scope) -> HeldEpisode:
        """A new episode of this caller.

        Raises:
            RefusedError: 429, too many are open; 503, the log does not answer or no engine serves;
                or it moved.
        """
        free = self._free(caller)
        request = None if free else self._next_request(caller)
        group_id = free if request is None else request.group_id
        # Before its record is written: it may be read back before the write returns.
        self._taken[group_id] = caller.policy.name
        try:
            if request is not None:
                await self._request(request)
            return await self._open(group_id, caller, scope)
        except FINAL_ERRORS:
            raise
        except LogError as error:
            raise log_refuses(error) from error
        finally:
            del self._taken[group_id]

    async def _open(self, group_id: str, caller: LiveCaller, scope: Scope) -> HeldEpisode:
        free = FreeEpisode(await self._admitted(group_id, scope), 0, 0)
        record, _ = await self._openings.open(
            free, lease_s=caller.policy.idle_s, session=caller.session
        )
        return self._access.known_episode(record.episode_id)

    def _free(self, caller: LiveCaller) -> str:
        """A group of the key whose request was given up or refused; "" if there is none."""
        partition = self._gateways.partition_of(caller.home)
        free = (
            group.facts.group_id
            for group in self._groups(caller)
            if group.is_unfinished(0) and not group.episodes and not group.closed
        )
        return next(
            (
                each
                for each in free
                if each not in self._taken and self._gateways.partition_of(each) == partition
            ),
            "",
        )

    def _next_request(self, caller: LiveCaller) -> RequestedGroup:
        """The record that asks for another group of the key.

        Raises:
            RefusedError: 429, the key has as many as it may.
        """
        self._check_room(caller)
        policy, configuration = caller.policy, self._configuration
        partition = self._gateways.partition_of(caller.home)
        source = f"live/{policy.name}/{partition}"
        key = f"{source}/{self._next_number(source, domain=policy.domain)}"
        return RequestedGroup(
            group_id=live_group_id(
                run=configuration.run,
                domain=policy.domain,
                idempotency_key=key,
                partition=partition,
                partitions=configuration.log.group_partitions,
            ),
            domain=policy.domain,
            purpose="eval",
            group_size=1,
            task=live_task(policy),
            idempotency_key=key,
            requested_ms=self._clock.wall_ms(),
            source="live",
        )

    def _check_room(self, caller: LiveCaller) -> None:
        policy, groups = caller.policy, self._registry.groups
        asking = sum(
            name == policy.name and group_id not in groups for group_id, name in self._taken.items()
        )
        if len(self._groups(caller)) + asking >= policy.episodes_max:
            raise busy(
                f"{policy.episodes_max} conversations of {policy.name} are open (episodes_max)",
                limit="requests",
            )

    def _next_number(self, source: str, *, domain: str) -> int:
        """The lowest number that nobody has asked for, which is asked for from now on.

        Also if its record cannot be written: the log may have it, and then another conversation
        takes the group when it is read.
        """
        asked, start = self._registry.asked, self._numbers.get(source, 0)
        number = asked.first_unasked(source, domain=domain, start=start)
        self._numbers[source] = number + 1
        return number

    async def _request(self, record: RequestedGroup) -> None:
        await self._outbox.promise(record, tenure=self._access.tenure(record.group_id))
        self._registry.apply_requested_group(record)

    async def _admitted(self, group_id: str, scope: Scope) -> Group:
        """The group, once the scheduler has admitted it: at once, if an engine serves."""

        def look() -> Group | None:
            self._access.check_here(group_id)
            group = self._registry.groups.get(group_id)
            return group if group is not None and group.state == "admitted" else None

        with self._hold.waiting(scope) as left_s:
            group = await self._changed.until(look, group_id=group_id, timeout_s=left_s)
        if group is None:
            raise busy("no engine serves at the moment: ask again", status=503)
        return group


def _named(send: Send, episode: HeldEpisode) -> Send:
    """Sends an answer with the id of its episode."""
    header = (EPISODE_HEADER.encode(), episode.episode_id.encode())

    async def send_named(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start" and message["status"] == HTTPStatus.OK:
            message = {**message, "headers": [*message["headers"], header]}
        await send(message)

    return send_named
