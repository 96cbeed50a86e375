"""Lanes whose engines fail: when they are left alone, and that they get no run's requests."""

import pytest

from forgemq_contracts.weights import ReportedEngine
from forgemq_gateway.core.circuits import PAUSE_S_MAX, Circuits
from forgemq_gateway.core.lanes import Lanes


def test_a_circuit_opens_at_the_third_error_in_a_row_and_each_trial_doubles_the_pause() -> None:
    circuits = Circuits()
    assert [circuits.note_error(2, 1, now_s=s) for s in (0.0, 0.1, 0.3)] == [0.0, 0.0, 1.0]
    assert not circuits.takes_requests(2, 1, now_s=1.29)
    assert circuits.takes_requests(2, 1, now_s=1.3)
    circuits.note_sent(2, 1)
    assert not circuits.takes_requests(2, 1, now_s=1.3), "one trial at a time"
    assert circuits.note_error(2, 1, now_s=1.4) == 2.0
    assert not circuits.takes_requests(2, 1, now_s=3.3)
    circuits.note_success(2, 1)
    assert circuits.takes_requests(2, 1, now_s=3.3)
    assert circuits.cost_s(2, 1) == 0


def test_errors_of_requests_from_before_the_pause_do_not_lengthen_it() -> None:
    circuits = Circuits()
    for _ in range(3):
        circuits.note_error(0, 1, now_s=0.0)
    assert [circuits.note_error(0, 1, now_s=0.5) for _ in range(20)] == [0.0] * 20
    assert circuits.takes_requests(0, 1, now_s=1.0)


def test_the_pause_never_exceeds_its_limit_however_long_an_engine_is_broken() -> None:
    """2,000 trials are seventeen hours."""
    circuits = Circuits()
    now_s = 0.0
    for _ in range(2000):
        now_s += 1 + circuits.note_error(0, 1, now_s=now_s)
    assert circuits.note_error(0, 1, now_s=now_s) == PAUSE_S_MAX


def test_another_epoch_begins_with_a_closed_circuit_and_an_older_one_tells_nothing() -> None:
    circuits = Circuits()
    for _ in range(3):
        circuits.note_error(0, 1, now_s=0.0)
    assert circuits.takes_requests(0, 2, now_s=0.0)
    circuits.note_error(0, 2, now_s=0.0)
    assert circuits.note_error(0, 1, now_s=0.0) == 0.0
    circuits.note_success(0, 1)
    assert circuits.cost_s(0, 2) > 0


def test_a_trial_that_is_given_up_lets_another_one_go() -> None:
    circuits = Circuits()
    for _ in range(3):
        circuits.note_error(0, 1, now_s=0.0)
    circuits.note_sent(0, 1)
    assert not circuits.takes_requests(0, 1, now_s=2.0)
    circuits.note_given_up(0, 1)
    assert circuits.takes_requests(0, 1, now_s=2.0)


@pytest.mark.parametrize("lanes", [2, 10])
def test_a_lane_that_answers_at_once_with_errors_is_not_the_cheapest(lanes: int) -> None:
    """Lane 0 fails in a millisecond, the others need a second; 2,000 requests in 20 s."""
    known = Lanes()
    taken, working = dict.fromkeys(range(lanes), 0), []
    for number in range(2000):
        now_s = number / 100
        for lane in range(lanes):
            known.report(heartbeat(lane), heard_s=now_s)
        for end_s, lane in [entry for entry in working if entry[0] <= now_s]:
            known.leave(lane, 1)
            known.circuits.note_success(lane, 1)
            working.remove((end_s, lane))
        chosen = known.choose(context_tokens=1000, cached=dict, now_s=now_s)
        assert chosen is not None
        taken[chosen.lane] += 1
        known.enter(chosen.lane, 1)
        if chosen.lane == 0:
            known.leave(0, 1)
            known.circuits.note_error(0, 1, now_s=now_s + 0.001)
        else:
            working.append((now_s + 1.0, chosen.lane))
    assert taken[0] <= 8, "three to open the circuit, then a trial after 1, 2, 4, 8 s"


def heartbeat(lane: int) -> ReportedEngine:
    return ReportedEngine(
        lane=lane,
        epoch=1,
        url="",
        is_serving=True,
        lineage=1,
        version=0,
        running=0,
        queued=0,
        reported_ms=0,
    )
