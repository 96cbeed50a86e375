"""One gateway in the storm: all of it but HTTP, on the storm's log and on the loop's time.

An agent's call is that of a route: `Operations` for groups and episodes, `complete` for a turn.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from forgemq_contracts.admin import Claim
from forgemq_gateway.access import Access
from forgemq_gateway.app import new_context
from forgemq_gateway.clock import Clock
from forgemq_gateway.core.attempts import Attempts
from forgemq_gateway.core.episodes import HeldEpisode
from forgemq_gateway.core.errors import MovedError
from forgemq_gateway.core.keys import AdminKeys
from forgemq_gateway.core.known_completion import KnownCompletion
from forgemq_gateway.core.lanes import Lanes
from forgemq_gateway.core.turns import OpenTurn
from forgemq_gateway.deliveries import Deliveries
from forgemq_gateway.dispatcher import Dispatcher, Result
from forgemq_gateway.operations import Operations
from forgemq_gateway.replica import Replica
from forgemq_gateway.settings import GatewaySettings
from forgemq_gateway.task_start import start_task
from forgemq_gateway.ticks import keep_ticking
from forgemq_gateway.whereabouts import Whereabouts
from forgemq_gateway.wire import Scope
from tests.simulation.attempts_records import parse, prepared_turn
from tests.simulation.storm.process import KilledError, Process

DEADLINE_MS = 20_000
"""Of a turn: longer than a lane is replaced, shorter than a group's deadline and a half."""

Answer = TypeVar("Answer")


class DownError(Exception):
    """No gateway answers: it is not there yet, or it went away meanwhile."""


@dataclass(frozen=True, slots=True)
class LoopClock(Clock):
    """Both clocks show the loop's time."""

    def wall_ms(self) -> int:
        return round(1000 * self.now_s())

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()


class StormGateway:
    """A gateway process: one of the run's, until it is killed or stopped.

    Args:
        url: Its address.
        peer_at: The gateway that answers at an address, if one does.
    """

    def __init__(
        self,
        process: Process,
        settings: GatewaySettings,
        *,
        url: str,
        peer_at: Callable[[str], "StormGateway | None"],
    ) -> None:
        self.process = process
        self.url = url
        self._peer_at = peer_at
        self._settings = settings
        self._is_serving = False
        self._ended = asyncio.Event()

    @property
    def is_alive(self) -> bool:
        """Whether it may still write."""
        return not self.process.is_killed and not self._ended.is_set()

    @property
    def serving(self) -> frozenset[int]:
        """The group partitions that it serves."""
        return frozenset(self.gateways.serving) if self._is_serving else frozenset()

    async def run(self) -> None:
        """Serve until the process is to stop.

        Raises:
            ExceptionGroup: with what ended it.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._serve(tasks)
        finally:
            self._is_serving = False
            self._ended.set()

    async def _serve(self, tasks: asyncio.TaskGroup) -> None:
        process = self.process
        self._context = context = await new_context(
            process.log,  # type: ignore[arg-type]
            configuration=process.configuration,
            settings=self._settings,
            telemetry=process.telemetry,
            tasks=tasks,
            gateway=self.url,
            peer_url=self.url,
            clock=LoopClock(),
        )
        self.registry, self.gateways = context.registry, context.gateways
        self.whereabouts = Whereabouts(context=context)
        keys = AdminKeys((self._settings.admin_key,), run=context.configuration.run)
        self._access = Access(keys=keys, registry=context.registry, gateways=self.gateways)
        attempts = Attempts(Lanes(), lane_hold_s=self._settings.lane_hold_s)
        self._dispatcher = dispatcher = Dispatcher(attempts, context=context)
        self.operations = operations = Operations(
            access=self._access, keys=keys, dispatcher=dispatcher, context=context
        )
        self._deliveries = Deliveries(context.outbox, clock=context.clock)
        ready = asyncio.Event()
        replica = Replica(
            process.log,  # type: ignore[arg-type]
            dispatcher=dispatcher,
            parse=parse,
            is_gone=self._is_gone,
            context=context,
            ready=ready,
        )
        working = [tasks.create_task(each) for each in await replica.start()]
        ticking = keep_ticking(
            context, dispatcher=dispatcher, operations=operations, is_ready=ready.is_set
        )
        working.append(tasks.create_task(ticking))
        self._is_serving = True
        await process.stop.wait()
        await replica.leave()
        self._is_serving = False
        for task in working:
            task.cancel()

    async def _is_gone(self, url: str) -> bool:
        return self._peer_at(url) is None

    async def call(
        self,
        ask: Callable[["StormGateway"], Awaitable[Answer]],
        *,
        group_id: str | None,
        number: int = 0,
    ) -> Answer:
        """What the run answers to an agent that asks this gateway, as `Passing` does it.

        Raises:
            DownError: it is gone before the agent has the answer.
            RefusedError, LogUnavailableError: as the call; the latter is a 503 over HTTP.
        """
        if not self._is_serving:
            raise DownError
        scope: Scope = {}
        while group_id is not None:
            owner = await self._alive(self.whereabouts.owner(scope, group_id, least=number))
            if owner is None:
                break
            peer = self._peer_at(owner.url)
            if peer is None:
                self.whereabouts.note_gone(owner)
                continue
            passed = peer.call(ask, group_id=group_id, number=self.gateways.owner)
            return await self._alive(passed)
        try:
            return await self._alive(ask(self))
        except MovedError:
            if number:
                raise
            return await self.call(ask, group_id=group_id)

    async def _alive(self, asked: Awaitable[Answer]) -> Answer:
        """The answer, unless this gateway ends before.

        Raises:
            DownError: it does.
        """
        asking = asyncio.ensure_future(asked)
        ending = asyncio.ensure_future(self._ended.wait())
        try:
            await self.process.pass_gate()
            await asyncio.wait((asking, ending), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise DownError
            await self.process.pass_gate()
            return asking.result()
        except KilledError:
            raise DownError from None
        finally:
            for task in (asking, ending):
                task.cancel()
            await asyncio.gather(asking, ending, return_exceptions=True)

    async def complete(self, claim: Claim, body: str, *, parent_id: str | None) -> str:
        """The id of the completion of this body, once it is delivered, as `TurnRoute` does it."""
        episode = self._access.episode(claim.key)
        known = episode.known([body])[0]
        completion = None if known is None else episode.history.completions.get(known)
        turn = None if known is None else episode.turns.get(known)
        episode.renew(self._context.clock.now_s())
        episode.clients += 1
        try:
            if completion is None:
                completion = await self._sampled(episode, body, turn=turn, parent_id=parent_id)
            await self._deliveries.record(episode, [completion], has_left=lambda: False)
            return completion.request_id
        finally:
            episode.clients -= 1
            episode.renew(self._context.clock.now_s())
            if not episode.clients:
                self._context.changed.notify(episode.opened.group_id)

    async def _sampled(
        self, episode: HeldEpisode, body: str, *, turn: OpenTurn | None, parent_id: str | None
    ) -> KnownCompletion:
        if turn is None:
            turn, result = self._begin(episode, body, parent_id=parent_id)
        else:
            deadline_ms = self._context.clock.wall_ms() + DEADLINE_MS
            result = self._dispatcher.join(episode, turn, deadline_ms=deadline_ms)
        try:
            await asyncio.wait((result,))
        finally:
            if not result.done():
                await self._dispatcher.leave(episode, [turn])
        return result.result()

    def _begin(
        self, episode: HeldEpisode, body: str, *, parent_id: str | None
    ) -> tuple[OpenTurn, Result]:
        """A turn behind this completion; if the gateway lacks it, one from its start."""
        parent = episode.history.completions.get(parent_id or "")
        now_ms = self._context.clock.wall_ms()
        turn = episode.begin(
            body,
            matched=None if parent is None else parent.request_id,
            requested_ms=now_ms,
            deadline_ms=now_ms + DEADLINE_MS,
        )
        result = self._dispatcher.begin(episode, turn)
        if parent is not None:
            parent.echoed = True
        prepared = prepared_turn(turn, parent=parent)
        dispatching = self._dispatcher.dispatch(episode, turn, prepared, trace=())
        start_task(self._context.tasks, dispatching)
        return turn, result
