"""Finds or begins the turn that a request means, and gives it up when nobody waits any more."""

import asyncio

from msgspec import Struct

from forgemq_gateway.composer import Composer, Plan, plan
from forgemq_gateway.core.chat import ChatRequest
from forgemq_gateway.core.episodes import Episode
from forgemq_gateway.core.errors import UNFORESEEN, RefusedError, failed
from forgemq_gateway.core.history import Completion
from forgemq_gateway.core.turns import Turn
from forgemq_gateway.dispatch import Dispatcher
from forgemq_gateway.surroundings import Surroundings
from forgemq_telemetry.traces import Headers, completion_trace, span_place


class Awaited(Struct, frozen=True, kw_only=True):
    """A turn that somebody waits for; `turn` is None where its completion is there already."""

    request_id: str
    result: "asyncio.Future[Completion]"
    turn: Turn | None = None

    @property
    def is_dispatched(self) -> bool:
        """Whether a lane has had it, so that a stream may open."""
        return self.turn is None or self.turn.state != "preparing"


class TurnSource:
    """Turns by what a request means: a new one, one in flight, or one answered already."""

    def __init__(self, composer: Composer, *, dispatcher: Dispatcher, around: Surroundings) -> None:
        self._deadline_ms = round(around.configuration.episodes.request_deadline_s * 1000)
        self._composer = composer
        self._dispatcher = dispatcher
        self._tasks = around.tasks
        self._clock = around.clock
        self._telemetry = around.telemetry

    def start(self, episode: Episode, request: ChatRequest, *, caller: Headers) -> Awaited:
        """The turn of this request, with one more client waiting for it.

        Args:
            episode: Whose key the request came with.
            request: Checked.
            caller: Trace context of the client; the turn's own trace links to it.
        """
        known = episode.known(request.body_digest)
        if known is not None:
            completion = episode.history.completions.get(known)
            if completion is not None:
                self._telemetry.count("gateway.requests", kind="replayed")
                return Awaited(request_id=known, result=_done(completion))
            turn = episode.turns.get(known)
            if turn is not None:
                self._telemetry.count("gateway.requests", kind="joined")
                return self._join(episode, turn)
        self._telemetry.count("gateway.requests", kind="fresh")
        return self._begin(episode, request, caller=caller)

    def _join(self, episode: Episode, turn: Turn) -> Awaited:
        turn.waiting += 1
        result = self._dispatcher.result(episode, turn)
        if turn.state == "requested":
            deadline_ms = self._clock.wall_ms() + self._deadline_ms
            self._dispatcher.resume(turn, deadline_ms=deadline_ms)
        return Awaited(request_id=turn.request_id, result=result, turn=turn)

    def _begin(self, episode: Episode, request: ChatRequest, *, caller: Headers) -> Awaited:
        planned = plan(request, episode=episode)
        now_ms = self._clock.wall_ms()
        match = planned.match
        turn = episode.begin(
            request.body_digest,
            matched=None if match is None else match.completion.request_id,
            requested_ms=now_ms,
            deadline_ms=now_ms + self._deadline_ms,
        )
        turn.waiting = 1
        result = self._dispatcher.result(episode, turn)
        self._tasks.create_task(self._prepare(episode, turn, planned, caller=caller))
        return Awaited(request_id=turn.request_id, result=result, turn=turn)

    async def _prepare(
        self, episode: Episode, turn: Turn, planned: Plan, *, caller: Headers
    ) -> None:
        """Compose and dispatch; what goes wrong is told to those who wait."""
        started_s = self._clock.now_s()
        links = (caller,) if span_place(caller) is not None else ()
        with self._telemetry.span(
            "request_completion",
            parent=completion_trace(turn.request_id),
            links=links,
            episode=episode.episode_id,
        ) as span:
            try:
                await self._compose(turn, planned, episode=episode)
                if planned.match is not None:
                    planned.match.completion.echoed = True
                if turn.part is not None and turn.part.is_fork:
                    self._telemetry.count("gateway.forks")
                await self._dispatcher.first(episode, turn, trace=span.headers())
            except RefusedError as error:
                self._telemetry.count("gateway.refused", status=error.status)
                episode.withdraw(turn)
                self._dispatcher.fail(turn, error)
        self._telemetry.observe("gateway.prepare_s", self._clock.now_s() - started_s)

    async def _compose(self, turn: Turn, planned: Plan, *, episode: Episode) -> None:
        """As `Composer.compose`; what nobody foresaw fails this turn and no other.

        Raises:
            RefusedError: 4xx as the composer says, or 500.
        """
        try:
            await self._composer.compose(turn, planned=planned, episode=episode)
        except UNFORESEEN as error:
            self._telemetry.event(
                "compose_failed", request=turn.request_id, error=f"{type(error).__name__}: {error}"
            )
            raise failed("the turn could not be composed", status=500) from error

    async def leave(self, episode: Episode, awaited: Awaited) -> None:
        """One client less waits; the last one gives the turn up."""
        turn = awaited.turn
        if turn is None:
            return
        turn.waiting -= 1
        if turn.waiting or awaited.result.done():
            return
        if turn.state == "preparing":
            episode.withdraw(turn)
        await self._dispatcher.abandon(episode, turn)


def _done(completion: Completion) -> "asyncio.Future[Completion]":
    future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
    future.set_result(completion)
    return future
