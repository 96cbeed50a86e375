"""What one turn goes through, effect by effect."""

from collections.abc import Sequence
from typing import Any

import pytest

from forgemq_contracts.arrays import pack_ids
from forgemq_contracts.completions import FailureKind, TurnPart
from forgemq_contracts.episodes import OpenedEpisode, Sampling
from forgemq_contracts.lanes import KnownLane
from forgemq_contracts.weights import ReportedEngine
from forgemq_gateway.core.attempts import Attempts, Moment
from forgemq_gateway.core.effects import (
    AnswerTurn,
    CancelAttempt,
    Effects,
    FailTurn,
    ReportFailure,
    SendAttempt,
)
from forgemq_gateway.core.episodes import HeldEpisode
from forgemq_gateway.core.errors import gone
from forgemq_gateway.core.known_completion import KnownCompletion
from forgemq_gateway.core.lane_results import LaneResult
from forgemq_gateway.core.lanes import Lanes
from forgemq_gateway.core.plans import Prepared
from forgemq_gateway.core.turns import OpenTurn
from tests.unit.gateway.completions import completion_of


class CountedLanes(Lanes):
    """Counts what grows with the number of turns."""

    def __init__(self) -> None:
        super().__init__()
        self.choices = 0
        self.held_asked = 0

    def choose(self, **asked: Any) -> KnownLane | None:
        self.choices += 1
        return super().choose(**asked)

    def holds(self, lane: int, epoch: int, *, now_s: float) -> bool:
        self.held_asked += 1
        return super().holds(lane, epoch, now_s=now_s)


class Scene:
    """One episode with one turn, and one lane that reports when a test says so."""

    def __init__(self) -> None:
        self.lanes = CountedLanes()
        self.attempts = Attempts(self.lanes, lane_hold_s=3.0)
        opened = OpenedEpisode(
            episode_id="g-1.0.0",
            group_id="g-1",
            index=0,
            attempt=0,
            key_sha256="0" * 64,
            sampling=Sampling(),
            history="append_only",
            lease_s=10,
            opened_ms=0,
        )
        self.episode = HeldEpisode(opened, lease_until_s=10.0)
        self.turn = self.begin()

    def begin(self, body: str = "d", *, held_s: float = 0.0) -> OpenTurn:
        turn = self.episode.begin(
            body, matched=None, requested_ms=0, deadline_ms=60_000, held_s=held_s
        )
        self.attempts.begin(self.episode, turn)
        return turn

    def dispatch(
        self,
        *,
        now_s: float = 0.0,
        turn: OpenTurn | None = None,
        parent: KnownCompletion | None = None,
        context: Sequence[int] = (1,),
    ) -> Effects:
        part = TurnPart(sequence=0, protocol="chat_completions", body_digest="d")
        shared = 0 if parent is None else parent.total_tokens
        prepared = Prepared(
            parent=parent,
            shared_tokens=shared,
            context=pack_ids(context),
            context_tokens=shared + len(context),
            sampling=Sampling(),
            part=part,
        )
        return self.attempts.dispatch(self.episode, turn or self.turn, prepared, at=at(now_s))

    def report(
        self,
        *,
        now_s: float = 0.0,
        epoch: int = 1,
        lane: int = 0,
        is_serving: bool = True,
        version: int = 0,
        cache_since_ms: int = 0,
    ) -> Effects:
        record = ReportedEngine(
            lane=lane,
            epoch=epoch,
            url="",
            is_serving=is_serving,
            lineage=1,
            version=version,
            running=0,
            queued=0,
            reported_ms=0,
            cache_since_ms=cache_since_ms,
        )
        return self.attempts.take_report(record, heard_s=now_s, at=at(now_s))

    def fail(self, failure: FailureKind, *, now_s: float = 0.0) -> Effects:
        result = LaneResult(
            episode=self.episode,
            request_id=self.turn.request_id,
            attempt=self.turn.sent - 1,
            completion=None,
            failure=failure,
            error="why",
        )
        return self.attempts.take_result(result, at=at(now_s))

    def answer(self, *, attempt: int) -> Effects:
        result = LaneResult(
            episode=self.episode,
            request_id=self.turn.request_id,
            attempt=attempt,
            completion=completion_of(1, context=[1], output=[2]),
        )
        return self.attempts.take_result(result, at=at(0.0))


def at(now_s: float) -> Moment:
    return Moment(now_s=now_s, wall_ms=round(now_s * 1000))


def kinds(effects: Effects) -> list[type]:
    return [type(effect) for effect in effects]


def statuses(effects: Effects) -> list[int]:
    return [effect.error.status for effect in effects if isinstance(effect, FailTurn)]


def test_a_turn_whose_client_was_held_before_waits_for_the_rest_of_the_hold() -> None:
    scene = Scene()
    scene.dispatch(turn=scene.begin("e", held_s=2.0))
    assert statuses(scene.attempts.tick(at(0.9))) == []
    assert statuses(scene.attempts.tick(at(1.0))) == [429]


def test_a_turn_waits_for_its_first_lane_and_is_refused_after_the_hold() -> None:
    scene = Scene()
    assert scene.dispatch() == ()
    assert scene.attempts.tick(at(2.9)) == ()
    assert statuses(scene.attempts.tick(at(3.0))) == [429]
    assert scene.episode.known(["d"]) == [None]


def test_a_held_turn_goes_to_the_first_lane_that_reports() -> None:
    scene = Scene()
    scene.dispatch()
    assert kinds(scene.report(now_s=1.0)) == [SendAttempt]


def test_a_silent_lane_keeps_its_turn_if_there_is_no_other_lane() -> None:
    scene = Scene()
    scene.report()
    scene.dispatch()
    assert scene.attempts.tick(at(6.0)) == ()
    assert scene.report(now_s=7.0) == ()
    assert scene.attempts.in_flight() == {0: 1}


def test_a_new_epoch_gets_the_turn_as_the_next_attempt() -> None:
    scene = Scene()
    scene.report()
    scene.dispatch()
    (sent,) = scene.report(now_s=1.0, epoch=2)
    assert isinstance(sent, SendAttempt)
    assert (sent.record.attempt, sent.record.epoch) == (1, 2)
    assert scene.attempts.in_flight() == {0: 1}


@pytest.mark.parametrize(
    ("failures", "status"),
    [
        (["engine", "engine", "engine"], 503),
        (["engine", "cancelled", "engine"], 503),
        (["context_missing", "engine", "context_missing", "engine"], 503),
        (["context_overflow"], 400),
        (["engine", "context_overflow"], 400),
    ],
)
def test_after_these_failures_the_clients_hear(failures: list[FailureKind], status: int) -> None:
    """The first context_missing asks for the whole context; later ones are engine errors."""
    scene = Scene()
    scene.report()
    scene.dispatch()
    for number, failure in enumerate(failures[:-1]):
        if number == 0 and failure == "context_missing":
            assert kinds(scene.fail(failure)) == [ReportFailure, SendAttempt]
        else:
            assert kinds(scene.fail(failure)) == [ReportFailure]
            assert kinds(scene.attempts.tick(at(2.0))) == [SendAttempt]
    effects = scene.fail(failures[-1])
    assert kinds(effects)[-2:] == [ReportFailure, FailTurn]
    assert statuses(effects) == [status]


def test_a_deadline_that_has_passed_ends_the_turn_and_one_that_has_not_is_the_lanes_error() -> None:
    """The turn's deadline is at 60 s; a lane whose clock is ahead says so at 1 s."""
    scene = Scene()
    scene.report()
    scene.dispatch()
    assert kinds(scene.fail("deadline", now_s=1.0)) == [ReportFailure]
    scene.report(now_s=60.0)
    assert kinds(scene.attempts.tick(at(60.0))) == [SendAttempt]
    assert statuses(scene.fail("deadline", now_s=60.0)) == [504]


def test_another_attempt_pauses_twice_as_long_after_each_error() -> None:
    scene = Scene()
    scene.report()
    scene.dispatch()
    scene.fail("engine")
    assert scene.attempts.tick(at(0.24)) == ()
    assert kinds(scene.attempts.tick(at(0.25))) == [SendAttempt]
    scene.fail("engine", now_s=0.25)
    assert scene.attempts.tick(at(0.74)) == ()
    assert kinds(scene.attempts.tick(at(0.75))) == [SendAttempt]


def test_another_attempt_goes_to_another_lane_however_busy_that_is() -> None:
    scene = Scene()
    scene.report()
    scene.dispatch()
    scene.report(lane=1)
    for _ in range(50):
        scene.attempts._lanes.enter(1, 1)
    scene.fail("engine")
    (sent,) = scene.attempts.tick(at(1.0))
    assert isinstance(sent, SendAttempt)
    assert sent.record.lane == 1


def test_a_turn_that_moves_off_a_silent_lane_is_cancelled_there() -> None:
    """The process on lane 0 may only be unheard: it would work on what nobody waits for."""
    scene = Scene()
    scene.report()
    scene.dispatch()
    effects: Effects = ()
    for second in range(1, 7):
        effects += scene.report(now_s=float(second), lane=1)
        effects += scene.attempts.tick(at(second + 0.5))
    cancelled, sent = effects
    assert isinstance(cancelled, CancelAttempt)
    assert isinstance(sent, SendAttempt)
    assert (cancelled.record.lane, cancelled.record.attempt) == (0, 0)
    assert (sent.record.lane, sent.record.attempt) == (1, 1)


def test_an_answer_of_the_attempt_before_cancels_the_newer_one_on_the_other_lane() -> None:
    """Lane 0 was only unheard, and answers after its turn has moved to lane 1."""
    scene = Scene()
    scene.report()
    scene.dispatch()
    for second in range(1, 7):
        scene.report(now_s=float(second), lane=1)
        scene.attempts.tick(at(second + 0.5))
    answered, cancelled = scene.answer(attempt=0)
    assert isinstance(answered, AnswerTurn)
    assert isinstance(cancelled, CancelAttempt)
    assert (cancelled.record.lane, cancelled.record.attempt) == (1, 1)
    assert scene.attempts.in_flight() == {0: 0, 1: 0}
    assert scene.answer(attempt=1) == ()


def test_an_answer_of_the_newest_attempt_cancels_nothing() -> None:
    scene = Scene()
    scene.report()
    scene.dispatch()
    assert kinds(scene.answer(attempt=0)) == [AnswerTurn]


def test_a_silence_of_all_lanes_moves_no_turn_and_neither_does_its_end() -> None:
    """Eight seconds without the log; then lane 1 is heard a while before lane 0."""
    scene = Scene()
    scene.report()
    scene.dispatch()
    scene.report(lane=1)
    effects: Effects = ()
    for quarter in range(1, 33):
        effects += scene.attempts.tick(at(quarter / 4))
    effects += scene.report(now_s=8.0, lane=1)
    effects += scene.attempts.tick(at(8.25))
    effects += scene.report(now_s=9.0, lane=0)
    effects += scene.attempts.tick(at(9.25))
    assert effects == ()
    assert scene.attempts.in_flight() == {0: 1, 1: 0}


def test_an_abandoned_turn_is_cancelled_and_a_client_that_returns_continues_it() -> None:
    scene = Scene()
    scene.report()
    scene.dispatch()
    (cancelled,) = scene.attempts.leave(scene.episode, scene.turn)
    assert isinstance(cancelled, CancelAttempt)
    assert cancelled.record.attempt == 0
    assert scene.fail("cancelled") == ()
    (sent,) = scene.attempts.join(scene.episode, scene.turn, deadline_ms=90_000, at=at(1.0))
    assert isinstance(sent, SendAttempt)
    assert (sent.record.attempt, sent.record.deadline_ms) == (1, 90_000)


def test_a_group_that_ends_during_the_preparation_sends_nothing_to_a_lane() -> None:
    scene = Scene()
    scene.report()
    assert statuses(scene.attempts.end_turns(scene.episode, gone("over"))) == [410]
    assert scene.dispatch() == ()


def test_a_client_that_returns_during_the_preparation_is_not_refused_with_the_turn_it_left() -> (
    None
):
    scene = Scene()
    abandoned = scene.turn
    scene.attempts.leave(scene.episode, abandoned)
    again = scene.begin()
    assert again.request_id == abandoned.request_id
    assert scene.attempts.refuse(scene.episode, abandoned, gone("over")) == ()
    assert again.waiting == 1


def test_while_no_lane_takes_requests_no_held_turn_looks_for_one() -> None:
    scene = Scene()
    turns = [scene.turn, *(scene.begin(str(number)) for number in range(20))]
    for turn in turns:
        scene.dispatch(turn=turn)
    asked = scene.lanes.choices
    for tenth in range(10):
        assert scene.report(now_s=tenth / 10, is_serving=False) == ()
        assert scene.attempts.tick(at(tenth / 10)) == ()
    assert scene.lanes.choices == asked
    assert kinds(scene.report(now_s=1.0, lane=1)) == [SendAttempt] * 21


def test_a_tick_asks_once_for_each_lane_however_many_turns_are_there() -> None:
    scene = Scene()
    scene.report()
    for turn in [scene.turn, *(scene.begin(str(number)) for number in range(20))]:
        scene.dispatch(turn=turn)
    assert scene.attempts.in_flight() == {0: 21}
    before = scene.lanes.held_asked
    assert scene.attempts.tick(at(1.0)) == ()
    assert scene.lanes.held_asked == before + 1


def test_a_late_turn_on_a_live_lane_ends_and_a_client_that_joined_has_put_that_off() -> None:
    scene = Scene()
    scene.report()
    other = scene.begin("other")
    scene.dispatch()
    scene.dispatch(turn=other)
    scene.attempts.join(scene.episode, other, deadline_ms=80_000, at=at(1.0))
    ended: dict[int, list[str]] = {}
    for second in range(1, 90):
        scene.report(now_s=float(second))
        for effect in scene.attempts.tick(at(second)):
            assert isinstance(effect, FailTurn)
            ended.setdefault(second, []).append(effect.request_id)
    assert ended == {63: [scene.turn.request_id], 83: [other.request_id]}
    assert scene.attempts.in_flight() == {0: 0}


def test_deadlines_of_turns_that_have_ended_are_forgotten() -> None:
    scene = Scene()
    for number in range(1000):
        scene.attempts.leave(scene.episode, scene.begin(str(number)))
    assert len(scene.attempts._waited._deadlines) < 100
