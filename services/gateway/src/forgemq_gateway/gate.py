"""Lets requests of agents in, within the limits of their key, before any of their body is read."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from forgemq_contracts.run import RunConfiguration
from forgemq_gateway.access import Access
from forgemq_gateway.context import GatewayContext
from forgemq_gateway.core.admission import Admission, Limits, Ticket, no_place
from forgemq_gateway.core.episodes import HeldEpisode
from forgemq_gateway.core.errors import MovedError, RefusedError
from forgemq_gateway.core.live import LiveCaller
from forgemq_gateway.holding import Hold
from forgemq_gateway.settings import GatewaySettings
from forgemq_gateway.wire import Receive, Scope, Send, send_refusal

Serve: TypeAlias = Callable[[Scope, Receive, Send, HeldEpisode], Awaitable[None]]
ServeLive: TypeAlias = Callable[[Scope, Receive, Send, LiveCaller], Awaitable[None]]

# Of all keys together; an agent and its helpers rarely have more calls in flight at once.
_REQUESTS_AN_EPISODE = 4
_REQUESTS_LEAST = 1024


class Gate:
    """Holds a request without a place, and sends no byte meanwhile; then it is 429.

    Only requests with a live key or that of an open episode come so far: any other is 401 at once.
    """

    def __init__(self, access: Access, *, context: GatewayContext) -> None:
        settings = context.settings
        self._access = access
        self._admission = Admission(limits_of(settings, context.configuration))
        self._hold = Hold(settings.lane_hold_s, clock=context.clock)
        self._clock = context.clock
        self._telemetry = context.telemetry
        self._held: dict[Ticket, asyncio.Future[None]] = {}

    async def serve(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        key: str | None,
        *,
        route: Serve,
        live: ServeLive,
        shape: Callable[[RefusedError], object],
    ) -> None:
        """Serve one request by its route when it has a place, or refuse it in its protocol."""
        try:
            caller = self._access.live_caller(key, scope)
            if caller is not None:
                name = f"live/{caller.policy.name}"
                await self._placed(scope, name, lambda: live(scope, receive, send, caller))
                return
            episode = self._access.episode(key)
            await self._placed(
                scope, episode.episode_id, lambda: route(scope, receive, send, episode)
            )
        except MovedError:
            raise
        except RefusedError as error:
            self._telemetry.count("gateway.refused", status=error.status, limit=error.limit)
            await send_refusal(send, error, shape=shape)

    async def _placed(self, scope: Scope, key: str, serve: Callable[[], Awaitable[None]]) -> None:
        """Serve a request while it has a place.

        Raises:
            RefusedError: 429, as `Admission.arrive`, or none became free in time.
        """
        ticket = self._admission.arrive(key, now_s=self._clock.now_s())
        if ticket.pushed_out is not None:
            self._held.pop(ticket.pushed_out).set_result(None)
        try:
            if not ticket.has_place:
                await self._wait(scope, ticket)
            await serve()
        finally:
            for admitted in self._admission.leave(ticket):
                self._held.pop(admitted).set_result(None)

    async def _wait(self, scope: Scope, ticket: Ticket) -> None:
        placed = self._held[ticket] = asyncio.get_running_loop().create_future()
        try:
            with self._hold.waiting(scope) as left_s:
                await asyncio.wait((placed,), timeout=left_s)
        finally:
            self._held.pop(ticket, None)
        if not ticket.has_place:
            raise no_place()


def limits_of(settings: GatewaySettings, configuration: RunConfiguration) -> Limits:
    """The limits in the settings, or those that follow from the run's episodes."""
    episodes = sum(queue.slots * queue.group_size for queue in configuration.queues)
    least = max(_REQUESTS_LEAST, _REQUESTS_AN_EPISODE * episodes)
    requests_max = settings.requests_max or least
    return Limits(
        requests_max=requests_max,
        waiting_max=settings.requests_waiting_max or requests_max,
        key_requests_max=settings.key_requests_max,
        key_rate_per_s_max=settings.key_requests_per_s_max,
    )
