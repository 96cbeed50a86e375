"""Finds or begins the turn that a request means, and abandons it if no client waits for it."""

import asyncio
import traceback
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from forgemq_gateway.composer import Composer
from forgemq_gateway.context import GatewayContext
from forgemq_gateway.core.choices import choices_of
from forgemq_gateway.core.context_cuts import told_cuts
from forgemq_gateway.core.episodes import HeldEpisode
from forgemq_gateway.core.errors import RefusedError, failed
from forgemq_gateway.core.known_completion import KnownCompletion
from forgemq_gateway.core.message_paths import Branch
from forgemq_gateway.core.path_limits import check_path_count
from forgemq_gateway.core.plans import Plan, Prepared, plan
from forgemq_gateway.core.repetition import repetition
from forgemq_gateway.core.requests import Request
from forgemq_gateway.core.turns import OpenTurn
from forgemq_gateway.dispatcher import Dispatcher, Result
from forgemq_gateway.task_start import start_task
from forgemq_telemetry.traces import Headers, completion_trace, headers_from_http, span_ids


class Awaited(Struct, frozen=True, kw_only=True):
    """A turn that a client waits for; `turn` is None if its completion was there already."""

    request_id: str
    result: Result
    turn: OpenTurn | None = None

    @property
    def is_dispatched(self) -> bool:
        """Whether a lane has had it, so that a stream may open."""
        return self.turn is None or self.turn.sent > 0


class TurnSource:
    """Turns by what a request means: a new one, an open one, or one that was answered."""

    def __init__(
        self, composer: Composer, *, dispatcher: Dispatcher, context: GatewayContext
    ) -> None:
        self.live = dispatcher.live
        self._deadline_ms = round(context.configuration.episodes.request_deadline_s * 1000)
        self._paths_max = context.settings.episode_paths_max
        self._composer = composer
        self._dispatcher = dispatcher
        self._tasks = context.tasks
        self._clock = context.clock
        self._telemetry = context.telemetry

    def start(
        self,
        episode: HeldEpisode,
        request: Request,
        *,
        headers: Mapping[str, str],
        held_s: float = 0.0,
    ) -> tuple[Awaited, ...]:
        """Let a client wait for the turns that this request means, one for each choice.

        Its headers, by name in lower case, say whether it is a retry, what the agent did to its
        context, and carry the client's trace context; each turn's trace links to it. Its turns
        wait for a lane so much shorter as it was held already.

        Raises:
            RefusedError: 400: what it says about its context breaks a rule.
        """
        repeated = repetition(headers, body_digest=request.body_digest)
        cuts = told_cuts(headers, known=episode.history.completions)
        choices = choices_of(replace(request, body_digest=repeated.body_digest, cuts=cuts))
        known = episode.known(
            [choice.body_digest for choice in choices], is_retry=repeated.is_retry
        )
        caller = headers_from_http(headers)
        return tuple(
            self._known(episode, before)
            or self._begin(episode, choice, caller=caller, held_s=held_s)
            for choice, before in zip(choices, known, strict=True)
        )

    def _known(self, episode: HeldEpisode, request_id: str | None) -> Awaited | None:
        """The turn with this id, answered or open; None if there is none."""
        if request_id is None:
            return None
        completion = episode.history.completions.get(request_id)
        if completion is not None:
            self._telemetry.count("gateway.requests", kind="replayed")
            return Awaited(request_id=request_id, result=_done(completion))
        turn = episode.turns.get(request_id)
        if turn is None:
            return None
        self._telemetry.count("gateway.requests", kind="joined")
        return self._join(episode, turn)

    async def leave(self, episode: HeldEpisode, awaited: Sequence[Awaited]) -> None:
        """End a client's wait; abandon each turn of which it had not heard, if it was the last."""
        unheard = [each.turn for each in awaited if each.turn and not each.result.done()]
        if unheard:
            await self._dispatcher.leave(episode, unheard)

    def _join(self, episode: HeldEpisode, turn: OpenTurn) -> Awaited:
        deadline_ms = self._clock.wall_ms() + self._deadline_ms
        result = self._dispatcher.join(episode, turn, deadline_ms=deadline_ms)
        return Awaited(request_id=turn.request_id, result=result, turn=turn)

    def _begin(
        self, episode: HeldEpisode, request: Request, *, caller: Headers, held_s: float
    ) -> Awaited:
        self._telemetry.count("gateway.requests", kind="fresh")
        planned = plan(request, history=episode.history)
        now_ms = self._clock.wall_ms()
        match = planned.match
        branch = Branch(planned.keys)
        if match is not None:
            branch = Branch(planned.keys[match.consumed :], match.path)
        turn = episode.begin(
            request.body_digest,
            branch=branch,
            matched=None if match is None else match.completion.request_id,
            requested_ms=now_ms,
            deadline_ms=now_ms + self._deadline_ms,
            held_s=held_s,
        )
        result = self._dispatcher.begin(episode, turn)
        start_task(self._tasks, self._prepare(episode, turn, planned, caller=caller))
        return Awaited(request_id=turn.request_id, result=result, turn=turn)

    async def _prepare(
        self, episode: HeldEpisode, turn: OpenTurn, planned: Plan, *, caller: Headers
    ) -> None:
        """Make the turn into tokens and dispatch it; clients get an error if that fails."""
        started_s = self._clock.now_s()
        links = (caller,) if span_ids(caller) is not None else ()
        with self._telemetry.span(
            "request_completion",
            parent=completion_trace(turn.request_id),
            links=links,
            episode=episode.episode_id,
        ) as span:
            try:
                prepared = await self._compose(turn, planned, episode=episode)
            except RefusedError as error:
                self._dispatcher.refuse(episode, turn, error)
            else:
                if planned.match is not None:
                    planned.match.completion.echoed = True
                if prepared.part.fork_reason is not None:
                    self._telemetry.count("gateway.forks", reason=prepared.part.fork_reason)
                await self._dispatcher.dispatch(episode, turn, prepared, trace=span.headers())
        self._telemetry.observe("gateway.prepare_s", self._clock.now_s() - started_s)

    async def _compose(self, turn: OpenTurn, planned: Plan, *, episode: HeldEpisode) -> Prepared:
        """As `Composer.prepare`; any other error is a 500 of this turn.

        Raises:
            RefusedError: 4xx as the composer or the limit on paths says, or 500.
        """
        try:
            prepared = await self._composer.prepare(turn, planned=planned, episode=episode)
            check_path_count(prepared, episode=episode, paths_max=self._paths_max)
        except RefusedError:
            raise
        except Exception as error:
            # Chat templates and tokenizers run on what a client sent and may raise anything. One
            # request must not end the gateway of the whole run: it fails, with a traceback logged.
            self._telemetry.event(
                "compose_failed",
                request=turn.request_id,
                error=f"{type(error).__name__}: {error}",
                traceback=traceback.format_exc(),
            )
            raise failed("the turn could not be composed", status=500) from error
        return prepared


def _done(completion: KnownCompletion) -> Result:
    result: Result = asyncio.get_running_loop().create_future()
    result.set_result(completion)
    return result
