"""The policy of attempts: which lane gets a turn, when it moves, when its clients get a result.

Invariant: every turn ends once: answered, refused or abandoned. More precisely, each client that
waits leaves or gets one result, and a turn is open here as long as a client waits for it.

Pure: every method returns effects, in order; `dispatcher.py` applies them.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec import Struct

from forgemq_contracts.completions import CancelledCompletion, RequestedCompletion
from forgemq_contracts.groups import AdmittedGroup
from forgemq_contracts.lanes import KnownLane
from forgemq_contracts.weights import ReportedEngine
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
from forgemq_gateway.core.errors import (
    RefusedError,
    busy,
    engine_constraint,
    engine_overflow,
    failed,
)
from forgemq_gateway.core.known_completion import KnownCompletion
from forgemq_gateway.core.lane_results import LaneResult, is_engines_fault
from forgemq_gateway.core.lanes import Lanes
from forgemq_gateway.core.plans import Prepared
from forgemq_gateway.core.turns import OpenTurn, cached_by_lane, cached_expected, requested
from forgemq_gateway.core.waited_turns import WaitedTurn, WaitedTurns

# After this many engine errors for one request stop retrying: the request is the likely cause.
ENGINE_ERRORS_MAX = 3

# Pause before another attempt at a request that an engine failed; doubled with each error.
RETRY_PAUSE_S = 0.25

# A lane ends a request at its deadline by itself, and its word may take a moment to arrive.
DEADLINE_GRACE_MS = 2000


class Moment(NamedTuple):
    """The time: monotonic seconds for lanes and holds, the wall clock for deadlines."""

    now_s: float
    wall_ms: int


class RestoredTurn(Struct, frozen=True, kw_only=True):
    """A turn read back from the log, and whether its lane may still answer it."""

    turn: OpenTurn
    is_on_lane: bool


class Attempts:
    """All turns that clients wait for, and the lanes that work on them.

    Example: `begin`, then `dispatch` sends attempt 0 to lane 1. Lane 1 falls silent; a `tick` after
    its lapse sends attempt 1 to lane 2. `take_result` of either attempt answers the clients; the
    newer attempt is cancelled if it was the older one's, and what comes of it finds no turn.

    Args:
        lane_hold_s: A new turn waits this long for a lane, then its clients get a 429.
    """

    def __init__(self, lanes: Lanes, *, lane_hold_s: float) -> None:
        self._lanes = lanes
        self._lane_hold_s = lane_hold_s
        self._waited = WaitedTurns()
        self._held: dict[str, WaitedTurn] = {}

    # Clients.

    def begin(self, episode: HeldEpisode, turn: OpenTurn) -> None:
        """Note the first client of a new turn."""
        turn.waiting = 1
        self._waited.add(episode, turn)

    def join(
        self, episode: HeldEpisode, turn: OpenTurn, *, deadline_ms: int, at: Moment
    ) -> Effects:
        """Note another client of a turn; work on it goes on if it had stopped."""
        turn.waiting += 1
        self._waited.add(episode, turn)
        if turn.state != "requested":
            return ()
        turn.not_before_s = 0.0  # Its client has paused already.
        turn.deadline_ms = max(turn.deadline_ms, deadline_ms)
        return self._advance(episode, turn, at)

    def dispatch(
        self, episode: HeldEpisode, turn: OpenTurn, prepared: Prepared, *, at: Moment
    ) -> Effects:
        """Give a prepared turn to a lane, at the latest after the hold."""
        if turn.state == "ended":  # Its clients left, or its group ended, during the preparation.
            return ()
        turn.prepared, turn.state = prepared, "held"
        turn.held_until_s = at.now_s + max(0.0, self._lane_hold_s - turn.held_s)
        self._held[turn.request_id] = WaitedTurn(episode, turn)
        return self._advance(episode, turn, at)

    def refuse(self, episode: HeldEpisode, turn: OpenTurn, error: RefusedError) -> Effects:
        """Refuse a turn that no lane has had; its body is new again."""
        if turn.state == "ended":
            return ()
        self._withdraw(episode, turn)
        return self._fail(turn, error)

    def leave(self, episode: HeldEpisode, turn: OpenTurn) -> Effects:
        """Remove a client that has not heard; without clients the turn is abandoned."""
        turn.waiting -= 1
        if turn.waiting:
            return ()
        self._waited.remove(turn)
        if turn.sent:
            return self._cancel(turn)
        self._withdraw(episode, turn)
        return ()

    def end_turns(self, episode: HeldEpisode, error: RefusedError) -> Effects:
        """End every turn of an episode that is over."""
        effects: list[Effect] = []
        for turn in list(episode.turns.values()):
            effects += self._fail(turn, error)
            effects += self._cancel(turn)
            self._end(episode, turn)
        return tuple(effects)

    def move_turns(self, episode: HeldEpisode, error: RefusedError) -> Effects:
        """Forget the turns of an episode that another gateway has now; nothing is cancelled."""
        effects: list[Effect] = []
        for turn in list(episode.turns.values()):
            effects += self._fail(turn, error)
            self._leave_lane(turn)
            self._end(episode, turn)
        return tuple(effects)

    # Lanes.

    def take_result(self, result: LaneResult, *, at: Moment) -> Effects:
        """Answer the turn's clients, or try again."""
        episode, turn = result.episode, result.episode.turns.get(result.request_id)
        if result.completion is not None:
            self._lanes.circuits.note_success(result.completion.lane, result.completion.epoch)
            self._lanes.output_length.note(result.completion.output_tokens)
        if turn is None:
            return ()
        if result.completion is not None:
            return self._answer(episode, turn, result.completion, attempt=result.attempt)
        if turn.lane < 0 or result.attempt != turn.sent - 1:
            return ()  # An attempt that was given up already; its failure says nothing new.
        lane, epoch = turn.lane, turn.epoch
        self._leave_lane(turn)
        effects: Effects = ()
        is_engines = is_engines_fault(result, turn, wall_ms=at.wall_ms)
        if is_engines:
            turn.failed_on = lane
            pause_s = self._lanes.circuits.note_error(lane, epoch, now_s=at.now_s)
            effects = (ReportCircuit(lane, pause_s, result.error),) if pause_s else ()
        if turn not in self._waited:
            return effects  # A client that comes back starts the next attempt.
        report = ReportFailure(result.request_id, result.failure, result.error)
        if is_engines:
            return (*effects, report, *self._retry_later(turn, result, at))
        return (*effects, report, *self._retry(episode, turn, result, at))

    def _answer(
        self, episode: HeldEpisode, turn: OpenTurn, completion: KnownCompletion, *, attempt: int
    ) -> Effects:
        """Answer the clients; a newer attempt than the one that answered is of no more use."""
        is_newest = attempt == turn.sent - 1
        cancelled = () if is_newest else self._cancel(turn)
        self._leave_lane(turn)
        self._end(episode, turn)
        turn.waiting, episode.is_context_full = 0, False
        was_waited = self._waited.remove(turn) is not None
        return (AnswerTurn(completion), *cancelled) if was_waited else cancelled

    def lose_attempt(self, record: RequestedCompletion, error: RefusedError) -> Effects:
        """Tell the clients that an attempt may not be on the log; a client's retry sends another.

        If the log has it all the same, the first result of either attempt answers.
        """
        waited = self._waited.get(record.request_id)
        if waited is None or waited.turn.lane < 0 or waited.turn.sent - 1 != record.attempt:
            return ()
        self._leave_lane(waited.turn)
        return self._fail(waited.turn, error)

    def take_report(self, record: ReportedEngine, *, heard_s: float, at: Moment) -> Effects:
        """Take a heartbeat: a new epoch has lost what the old one had, and held turns may go."""
        if self._lanes.report(record, heard_s=heard_s):
            return self.tick(at)
        if not self._held or not self._lanes.takes_requests(at.now_s):
            return ()  # A tick ends those whose hold is over.
        return self._advance_all(list(self._held.values()), at)

    def admit(self, record: AdmittedGroup) -> None:
        """Give lanes behind the weights of this admission no requests."""
        self._lanes.admit(record)

    def tick(self, at: Moment) -> Effects:
        """Move turns off lanes that are gone, and end those whose deadline or hold is over."""
        silent = [
            turn
            for lane, epoch in self._waited.lanes()
            if not self._lanes.holds(lane, epoch, now_s=at.now_s)
            for turn in self._waited.on(lane, epoch)
        ]
        late = self._waited.late(at.wall_ms - DEADLINE_GRACE_MS)
        return self._advance_all([*late, *silent, *self._waited.without_lane()], at)

    def restore_lane(self, record: ReportedEngine, *, heard_s: float) -> None:
        """Take a heartbeat of before the start; no turn is open yet."""
        self._lanes.report(record, heard_s=heard_s)

    def restore(self, turns: Iterable[RestoredTurn]) -> None:
        """Take over the turns of before the start; their clients come back or do not."""
        for each in turns:
            turn = each.turn
            if each.is_on_lane:
                self._lanes.enter(turn.lane, turn.epoch)
            else:
                turn.lane = -1

    def in_flight(self) -> Mapping[int, int]:
        """Requests in flight by lane."""
        return self._lanes.in_flight()

    # One turn.

    def _advance_all(self, waited: Iterable[WaitedTurn], at: Moment) -> Effects:
        effects: list[Effect] = []
        has_lane = self._lanes.takes_requests(at.now_s)
        for episode, turn in waited:
            if turn in self._waited:  # A turn that is late and silent comes twice.
                effects += self._advance(episode, turn, at, has_lane=has_lane)
        return tuple(effects)

    def _advance(
        self, episode: HeldEpisode, turn: OpenTurn, at: Moment, *, has_lane: bool = True
    ) -> Effects:
        """Send the turn unless a lane works on it, or fail it if its time is over.

        Without `has_lane` no lane takes requests, so it does not look for one.
        """
        if turn.state == "preparing":
            return ()
        if turn.sent and at.wall_ms > turn.deadline_ms + DEADLINE_GRACE_MS:
            self._leave_lane(turn)
            return self._fail(turn, _too_late())
        if turn.lane >= 0 and self._lanes.holds(turn.lane, turn.epoch, now_s=at.now_s):
            return ()
        if at.now_s < turn.not_before_s:
            return ()
        lane = self._choose(episode, turn, at) if has_lane else None
        if lane is not None:
            # A process that is only silent still works on it; one of an older epoch is gone.
            is_there = turn.lane >= 0 and self._lanes.is_epoch(turn.lane, turn.epoch)
            cancelled = self._cancel(turn) if is_there else ()
            self._leave_lane(turn)
            return (*cancelled, self._send(episode, turn, lane))
        # No lane to move to: the turn stays where it is, since a silent lane may be heard again.
        if turn.sent or at.now_s < turn.held_until_s:
            return ()
        return self.refuse(episode, turn, self._no_lane(at))

    def _no_lane(self, at: Moment) -> RefusedError:
        if failing := self._lanes.failing(at.now_s):
            lanes = ", ".join(str(lane) for lane in failing)
            return busy(f"the engines of all live lanes fail at the moment: {lanes}")
        return busy("no engine serves the newest weights at the moment")

    def _choose(self, episode: HeldEpisode, turn: OpenTurn, at: Moment) -> KnownLane | None:
        prepared = turn.prepared
        assert prepared is not None, f"turn {turn.request_id} is {turn.state} but not prepared"
        return self._lanes.choose(
            context_tokens=prepared.context_tokens,
            cached=lambda: cached_by_lane(
                prepared, episode.first_prompts, emptied=self._lanes.emptied
            ),
            now_s=at.now_s,
            failed_on=turn.failed_on,
        )

    def _send(self, episode: HeldEpisode, turn: OpenTurn, lane: KnownLane) -> SendAttempt:
        assert turn.prepared is not None
        turn.cached_expected = cached_expected(
            turn.prepared,
            episode.first_prompts,
            where=(lane.lane, lane.epoch, lane.weights),
            emptied=self._lanes.emptied,
        )
        turn.expected_under = lane.weights
        record = requested(turn, lane=lane.lane, epoch=lane.epoch)
        turn.state = "requested"
        turn.sent += 1
        self._waited.place(turn, lane=lane.lane, epoch=lane.epoch)
        self._held.pop(turn.request_id, None)
        uncached = turn.prepared.context_tokens - turn.cached_expected
        self._lanes.enter(lane.lane, lane.epoch, uncached_tokens=uncached)
        return SendAttempt(record)

    def _retry(
        self, episode: HeldEpisode, turn: OpenTurn, result: LaneResult, at: Moment
    ) -> Effects:
        """Try again at once, or tell the clients why that is of no use."""
        if result.is_constraint_refused:
            return self._fail(turn, engine_constraint(result.error))
        match result.failure:
            case "deadline":
                return self._fail(turn, _too_late())
            case "context_overflow":
                # The engine keeps a few positions back, so its limit can be below the run's.
                return self._fail(turn, engine_overflow(result.error))
            case "context_missing":
                turn.needs_full_context = True
        return self._advance(episode, turn, at)

    def _retry_later(self, turn: OpenTurn, result: LaneResult, at: Moment) -> Effects:
        """Let a tick try again after a pause: an engine may fail faster than it can recover."""
        turn.engine_errors += 1
        if turn.engine_errors >= ENGINE_ERRORS_MAX:
            turn.engine_errors = 0  # A client that comes back gets as many attempts again.
            return self._fail(turn, failed(f"the engine could not answer: {result.error}"))
        turn.not_before_s = at.now_s + RETRY_PAUSE_S * 2 ** (turn.engine_errors - 1)
        return ()

    def _fail(self, turn: OpenTurn, error: RefusedError) -> Effects:
        """Tell the clients; a requested turn stays known, so that a retry continues it."""
        turn.waiting = 0
        waited = self._waited.remove(turn)
        if waited is None:
            return ()
        waited.episode.is_context_full = error.is_context_full
        return (FailTurn(turn.request_id, error),)

    def _cancel(self, turn: OpenTurn) -> Effects:
        if turn.lane < 0:
            return ()
        record = CancelledCompletion(
            request_id=turn.request_id,
            attempt=turn.sent - 1,
            lane=turn.lane,
            group_id=turn.group_id,
        )
        self._leave_lane(turn)
        return (CancelAttempt(record),)

    def _withdraw(self, episode: HeldEpisode, turn: OpenTurn) -> None:
        self._end(episode, turn)
        episode.forget(turn)

    def _end(self, episode: HeldEpisode, turn: OpenTurn) -> None:
        turn.state = "ended"
        self._held.pop(turn.request_id, None)
        episode.turns.pop(turn.request_id, None)

    def _leave_lane(self, turn: OpenTurn) -> None:
        if turn.lane >= 0:
            self._lanes.leave(turn.lane, turn.epoch)
            self._waited.place(turn, lane=-1, epoch=turn.epoch)

    def _check(self) -> None:
        """Every turn ends once: it is open here exactly as long as a client waits for it."""
        self._waited._check()
        for episode, turn in self._waited:
            known = episode.turns.get(turn.request_id)
            assert known is turn, "an open turn is known to its episode"
            assert turn.waiting > 0, "a client waits for an open turn"
            assert turn.state != "ended", "an open turn has not ended"
            assert (turn.state == "requested") == (turn.sent > 0)
            assert (turn.state == "held") == (turn.request_id in self._held)
            assert turn.engine_errors < ENGINE_ERRORS_MAX
        assert all(turn in self._waited for _, turn in self._held.values())


def _too_late() -> RefusedError:
    return failed("no engine answered before the deadline", status=504)
