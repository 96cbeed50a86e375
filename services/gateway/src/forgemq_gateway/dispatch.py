"""Gives turns to lanes, takes back what lanes finished, and gives lost turns to other lanes."""

import asyncio

from forgemq_contracts.completions import CancelledCompletion, RequestedCompletion
from forgemq_contracts.weights import ReportedEngine
from forgemq_gateway.core.episodes import Episode
from forgemq_gateway.core.errors import RefusedError, busy, engine_overflow, failed, gone
from forgemq_gateway.core.history import Completion
from forgemq_gateway.core.lanes import Lane, Lanes
from forgemq_gateway.core.registry import Finish, Group
from forgemq_gateway.core.turns import Turn, cached_on, requested
from forgemq_gateway.pulse import Pulse
from forgemq_gateway.surroundings import Surroundings
from forgemq_telemetry.traces import Headers, completion_trace

# An engine that fails a request so often fails it for a reason that another try does not cure.
_ERRORS_MAX = 3

# A lane notices a deadline itself; this long after it the lane is not waited for any more.
_DEADLINE_GRACE_MS = 2000


class Dispatcher:
    """Turns in flight, their lanes, and those who wait for them.

    Args:
        lanes: Kept up to date by `engine_reported`.
        around: Requests and cancellations go to its outbox.
    """

    def __init__(self, lanes: Lanes, *, around: Surroundings) -> None:
        self.lanes = lanes
        self._outbox = around.outbox
        self._tasks = around.tasks
        self._clock = around.clock
        self._telemetry = around.telemetry
        self._lane_hold_s = around.settings.lane_hold_s
        self._pulse = Pulse()
        self._open: dict[str, tuple[Episode, Turn]] = {}
        self._results: dict[str, asyncio.Future[Completion]] = {}

    def result(self, episode: Episode, turn: Turn) -> "asyncio.Future[Completion]":
        """Completes with the turn's completion, or fails with what to tell the client."""
        future = self._results.get(turn.request_id)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            future.add_done_callback(_note_error)
            self._results[turn.request_id] = future
            self._open[turn.request_id] = (episode, turn)
        return future

    async def first(self, episode: Episode, turn: Turn, *, trace: Headers) -> None:
        """Give a composed turn to a lane.

        Raises:
            RefusedError: 429: no lane serves.
        """

        def choose() -> Lane | None:
            return self._choose(turn)

        lane = await self._pulse.until(choose, timeout_s=self._lane_hold_s)
        if lane is None:
            raise busy("no engine serves the newest weights at the moment")
        if turn.state != "ended":
            await self._outbox.completion_requested(self._taken(episode, turn, lane), headers=trace)

    def resume(self, turn: Turn, *, deadline_ms: int) -> None:
        """Somebody waits again for a turn that was given up or whose lane may be dead."""
        turn.deadline_ms = max(turn.deadline_ms, deadline_ms)
        self.redispatch()

    def engine_reported(self, record: ReportedEngine, *, heard_s: float) -> None:
        """A heartbeat; a new epoch has lost what the old one held."""
        if self.lanes.report(record, heard_s=heard_s):
            self.redispatch()
        self._pulse.beat()

    def finished(self, finish: Finish) -> None:
        """A lane's result, in the order of the log."""
        turn = finish.episode.turns.get(finish.request_id)
        if finish.completion is not None:
            if finish.completion.reply.malformed:
                self._telemetry.count("gateway.malformed_calls", finish.completion.reply.malformed)
            if turn is not None:
                self._end(finish.episode, turn)
            future = self._results.pop(finish.request_id, None)
            if future is not None and not future.done():
                future.set_result(finish.completion)
            return
        if turn is None or finish.attempt != turn.sent - 1:
            return
        if turn.request_id in self._open:
            self._attempt_failed(turn, finish.error)
        else:
            self._leave(turn)  # Nobody waits: whoever comes back gets another attempt.

    def _attempt_failed(self, turn: Turn, error: str) -> None:
        self._telemetry.count("gateway.attempts_failed")
        self._leave(turn)
        if error == "context_missing":
            turn.needs_full_context = True
        elif error == "deadline":
            self.fail(turn, failed("no engine answered before the deadline", status=504))
            return
        elif error.startswith("context_overflow"):
            # The engine keeps a few positions back, so its limit can be below the run's.
            self.fail(turn, engine_overflow(error))
            return
        else:
            turn.errors += 1
            self._telemetry.event("attempt_failed", request=turn.request_id, error=error)
        if turn.errors >= _ERRORS_MAX:
            turn.errors = 0
            self.fail(turn, failed(f"the engine could not answer: {error}"))
            return
        self.redispatch()

    def redispatch(self) -> None:
        """Look after every turn that is waited for: give it to a lane again, or give it up."""
        now_s, now_ms = self._clock.now_s(), self._clock.wall_ms()
        for episode, turn in list(self._open.values()):
            if turn.state != "requested":
                continue
            if now_ms > turn.deadline_ms + _DEADLINE_GRACE_MS:
                self._leave(turn)
                self.fail(turn, failed("no engine answered before the deadline", status=504))
                continue
            if turn.lane >= 0 and self.lanes.holds(turn.lane, turn.epoch, now_s=now_s):
                continue
            self._leave(turn)
            lane = self._choose(turn)
            if lane is None:
                continue
            self._telemetry.count("gateway.redispatched")
            write = self._outbox.completion_requested(
                self._taken(episode, turn, lane), headers=completion_trace(turn.request_id)
            )
            self._tasks.create_task(write)

    def fail(self, turn: Turn, error: RefusedError) -> None:
        """Tell everybody who waits; the turn stays known, so that a retry continues it."""
        self._open.pop(turn.request_id, None)
        future = self._results.pop(turn.request_id, None)
        if future is not None and not future.done():
            future.set_exception(error)

    async def abandon(self, episode: Episode, turn: Turn) -> None:
        """Nobody waits any more: the lane may stop."""
        self._open.pop(turn.request_id, None)
        self._results.pop(turn.request_id, None)
        if turn.state != "requested" or turn.lane < 0:
            return
        record = CancelledCompletion(
            request_id=turn.request_id,
            attempt=turn.sent - 1,
            lane=turn.lane,
            group_id=episode.opened.group_id,
        )
        self._leave(turn)
        self._telemetry.count("gateway.cancelled")
        await self._outbox.completion_cancelled(record)

    async def drop_group(self, group: Group) -> None:
        """The group is over: end its requests."""
        for episode in group.episodes.values():
            for turn in list(episode.turns.values()):
                is_open = turn.request_id in self._open
                self.fail(turn, gone(f"group {group.facts.group_id} is over"))
                if is_open:
                    await self.abandon(episode, turn)

    def _end(self, episode: Episode, turn: Turn) -> None:
        self._leave(turn)
        turn.state = "ended"
        episode.turns.pop(turn.request_id, None)
        self._open.pop(turn.request_id, None)

    def _choose(self, turn: Turn) -> Lane | None:
        def cached(lane: int, epoch: int) -> int:
            return cached_on(turn, lane, epoch)

        return self.lanes.choose(
            context_tokens=turn.context_tokens, cached=cached, now_s=self._clock.now_s()
        )

    def _taken(self, episode: Episode, turn: Turn, lane: Lane) -> RequestedCompletion:
        """The record of the next attempt, which this lane has from now on."""
        turn.lane, turn.epoch, turn.state = lane.number, lane.epoch, "requested"
        self.lanes.enter(lane.number, lane.epoch)
        record = requested(
            turn,
            episode_id=episode.episode_id,
            group_id=episode.opened.group_id,
            lane=lane.number,
            epoch=lane.epoch,
        )
        turn.sent += 1
        return record

    def _leave(self, turn: Turn) -> None:
        if turn.lane >= 0:
            self.lanes.leave(turn.lane, turn.epoch)
            turn.lane = -1


def _note_error(future: "asyncio.Future[Completion]") -> None:
    """An error nobody waits for any more is no error of the gateway."""
    if not future.cancelled():
        future.exception()
