"""Applies the effects of `core/attempts.py`: writes records and wakes the clients that wait."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from typing import TypeAlias

from forgemq_bus.errors import LogError
from forgemq_contracts.completions import CancelledCompletion, RequestedCompletion
from forgemq_contracts.speculation import trained_head
from forgemq_contracts.weights import ReportedEngine
from forgemq_gateway.context import GatewayContext
from forgemq_gateway.core.attempts import Attempts
from forgemq_gateway.core.effects import (
    AnswerTurn,
    CancelAttempt,
    Effect,
    Effects,
    FailTurn,
    ReportCircuit,
    ReportFailure,
    SendAttempt,
)
from forgemq_gateway.core.episodes import HeldEpisode
from forgemq_gateway.core.errors import MovedError, RefusedError, gone, log_refuses
from forgemq_gateway.core.group import Group
from forgemq_gateway.core.known_completion import KnownCompletion
from forgemq_gateway.core.lane_results import LaneResult
from forgemq_gateway.core.plans import Prepared
from forgemq_gateway.core.turns import OpenTurn
from forgemq_gateway.live_turns import LiveTurns
from forgemq_gateway.task_start import start_task
from forgemq_telemetry.traces import Headers, completion_trace

Result = asyncio.Future[KnownCompletion]

Write: TypeAlias = Callable[[], Coroutine[None, None, None]]


class Dispatcher:
    """One future for each turn that clients wait for; `attempts` decides everything else."""

    def __init__(self, attempts: Attempts, *, context: GatewayContext) -> None:
        self.attempts = attempts
        self.live = LiveTurns()
        self._outbox = context.outbox
        self._gateways = context.gateways
        self._standstill = context.standstill
        self._owners_hold_s = context.settings.restore_hold_s
        self._registry = context.registry
        self._changed = context.changed
        self._tasks = context.tasks
        self._clock = context.clock
        # An engine with a draft head files K/V by pairs of tokens: it reads one more of them again.
        self._kept_back_tokens = int(trained_head(context.configuration.speculation) is not None)
        self._telemetry = context.telemetry
        self._results: dict[str, Result] = {}
        self._traces: dict[str, Headers] = {}

    def begin(self, episode: HeldEpisode, turn: OpenTurn) -> Result:
        """Open a new turn; the future completes with its completion or a RefusedError."""
        self.attempts.begin(episode, turn)
        return self._result(turn)

    def join(self, episode: HeldEpisode, turn: OpenTurn, *, deadline_ms: int) -> Result:
        """Let another client wait for a turn, whether or not it is open.

        Raises:
            RefusedError: 503, the gateway ends and writes no attempt any more.
        """
        result = self._result(turn)
        at = self._clock.moment()
        self._start(self.attempts.join(episode, turn, deadline_ms=deadline_ms, at=at))
        return result

    async def dispatch(
        self, episode: HeldEpisode, turn: OpenTurn, prepared: Prepared, *, trace: Headers
    ) -> None:
        """Give a prepared turn to a lane; returns when its request is durable or waits."""
        if turn.request_id in self._results:
            self._traces[turn.request_id] = trace
        effects = self.attempts.dispatch(episode, turn, prepared, at=self._clock.moment())
        await self._write(effects)

    def refuse(self, episode: HeldEpisode, turn: OpenTurn, error: RefusedError) -> None:
        """Refuse a turn that could not be prepared."""
        self._start(self.attempts.refuse(episode, turn, error))

    async def leave(self, episode: HeldEpisode, turns: Sequence[OpenTurn]) -> None:
        """Remove a client from the turns of which it has not heard, before anything is written."""
        effects: list[Effect] = []
        for turn in turns:
            effects += self.attempts.leave(episode, turn)
            if not turn.waiting:
                self._results.pop(turn.request_id, None)
                self._traces.pop(turn.request_id, None)
        await self._write(tuple(effects))

    async def end_turns(self, episode: HeldEpisode, error: RefusedError) -> None:
        """End every turn of an episode that is over."""
        await self._write(self.attempts.end_turns(episode, error))

    def move(self, partitions: Collection[int]) -> None:
        """Forget the episodes of partitions that another gateway has taken over.

        Their turns and their lanes go on there; clients that wait here get a `MovedError`.
        """
        for group_id, group in list(self._registry.groups.items()):
            if self._gateways.partition_of(group_id) not in partitions:
                continue
            moved = MovedError(group_id)
            for episode in group.episodes.values():
                self._start(self.attempts.move_turns(episode, moved))
            group.forget_episodes()
            self._changed.notify(group_id)

    async def drop_group(self, group: Group) -> None:
        """End the turns of a group that has retired."""
        for episode in group.episodes.values():
            await self.end_turns(episode, gone(f"group {group.facts.group_id} is over"))

    def take_result(self, result: LaneResult) -> None:
        """Take a lane's result, in the order of the log."""
        if result.completion is not None:
            self._count_malformed(result.completion)
            self._count_cache_outcome(result, result.completion)
        self._start(self.attempts.take_result(result, at=self._clock.moment()))

    def _count_malformed(self, completion: KnownCompletion) -> None:
        if completion.reply.malformed:
            self._telemetry.count("gateway.malformed_calls", completion.reply.malformed)

    def _count_cache_outcome(self, result: LaneResult, completion: KnownCompletion) -> None:
        """Compare the tokens that the engine had cached with those that the lane was chosen for."""
        turn = result.episode.turns.get(result.request_id)
        if turn is None or turn.cached_expected is None or result.attempt != turn.sent - 1:
            return  # Nothing was expected of an earlier attempt, or of one before a restart.
        lane = completion.lane
        if completion.weights not in (None, turn.expected_under):
            # An update emptied the engine after the lane was chosen.
            self._telemetry.count("gateway.cache_outcomes", lane=lane, outcome="other_weights")
            return
        expected = max(0, turn.cached_expected - self._kept_back_tokens)
        extra = completion.cached_tokens - expected
        # The engine may have read the last token of the parent's output, which it sampled.
        outcome = "as_expected" if 0 <= extra <= 1 else "fewer" if extra < 0 else "more"
        self._telemetry.count("gateway.cache_outcomes", lane=lane, outcome=outcome)
        if extra < 0:
            self._telemetry.count("gateway.cache_missing_tokens", -extra, lane=lane)
        elif extra:
            self._telemetry.count("gateway.cache_extra_tokens", extra, lane=lane)

    def take_report(self, record: ReportedEngine) -> None:
        """Take a heartbeat that has just come."""
        at = self._clock.moment()
        self._start(self.attempts.take_report(record, heard_s=at.now_s, at=at))

    def tick(self) -> None:
        """Look after lanes, holds and deadlines; call it several times a second."""
        self._start(self.attempts.tick(self._clock.moment()))

    def _result(self, turn: OpenTurn) -> Result:
        result = self._results.get(turn.request_id)
        if result is None:
            result = asyncio.get_running_loop().create_future()
            result.add_done_callback(_retrieve_error)
            self._results[turn.request_id] = result
        return result

    async def _write(self, effects: Effects) -> None:
        writes = self._apply(effects)
        if len(writes) == 1:  # Nearly always: no task for it.
            await writes[0]()
        else:
            await asyncio.gather(*(write() for write in writes))

    def _start(self, effects: Effects) -> None:
        for write in self._apply(effects):
            start_task(self._tasks, write())

    def _apply(self, effects: Effects) -> list[Write]:
        """Wake the clients; returns what is to be written."""
        writes: list[Write] = []
        for effect in effects:
            match effect:
                case SendAttempt(record):
                    trace = completion_trace(record.request_id)
                    headers = self._traces.pop(record.request_id, trace)
                    if record.attempt:
                        self._telemetry.count("gateway.redispatched")
                    writes.append(partial(self._send, record, headers))
                case CancelAttempt(record):
                    self._telemetry.count("gateway.cancelled")
                    writes.append(partial(self._cancel, record))
                case AnswerTurn(completion):
                    self._take_future(completion.request_id).set_result(completion)
                case FailTurn(request_id, error):
                    self._take_future(request_id).set_exception(error)
                case ReportFailure():
                    self._report(effect)
                case ReportCircuit(lane, pause_s, error):
                    self._telemetry.count("gateway.circuits_opened", lane=lane)
                    self._telemetry.event("circuit_opened", lane=lane, pause_s=pause_s, error=error)
        return writes

    async def _send(self, record: RequestedCompletion, headers: Headers) -> None:
        """Write an attempt; if that fails, its clients are refused and nobody else."""
        try:
            if not await self._is_still_served(record.group_id):
                return
        except TimeoutError as late:
            self._start(self.attempts.lose_attempt(record, log_refuses(late)))
            return
        error = await self._outbox.try_write(record, headers=headers)
        if error is not None:
            self._write_failed(record.request_id, error)
            self._start(self.attempts.lose_attempt(record, log_refuses(error)))

    async def _cancel(self, record: CancelledCompletion) -> None:
        """Write a cancellation; without it the lane works in vain up to the deadline."""
        assert record.group_id is not None, "a gateway names the group of what it cancels"
        try:
            if not await self._is_still_served(record.group_id):
                return
        except TimeoutError:
            return
        error = await self._outbox.try_write(record)
        if error is not None:
            self._write_failed(record.request_id, error)

    async def _is_still_served(self, group_id: str) -> bool:
        """Whether what was just decided about a turn holds, once this process knows who owns it.

        After a standstill another gateway may have the turn, and what it does with it is not to be
        doubled or undone. Its clients here then get a `MovedError`, as `move` says.

        Raises:
            TimeoutError: it does not know in the time for which a request waits for that.
        """
        if not self._standstill.may_be_missed():
            return True
        tenure = self._gateways.tenure(group_id)
        async with asyncio.timeout(self._owners_hold_s):
            await self._standstill.is_over()
        return tenure is not None and tenure == self._gateways.tenure(group_id)

    def _write_failed(self, request_id: str, error: LogError) -> None:
        self._telemetry.event(
            "write_failed", request=request_id, error=f"{type(error).__name__}: {error}"
        )

    def _take_future(self, request_id: str) -> Result:
        self._traces.pop(request_id, None)
        return self._results.pop(request_id)

    def _report(self, failure: ReportFailure) -> None:
        self._telemetry.count("gateway.attempts_failed")
        if failure.failure in ("cancelled", "engine"):
            self._telemetry.event("attempt_failed", request=failure.request_id, error=failure.error)


def _retrieve_error(result: Result) -> None:
    """Retrieve the error: asyncio would log one that no client has waited for."""
    if not result.cancelled():
        result.exception()
