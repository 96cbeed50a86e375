"""What a request's time in the engine would have been without the others beside it."""

import time

import pytest

from forgemq_contracts.weights import EngineLoad
from forgemq_inference.batch_clock import BatchClock, BatchMoment
from forgemq_inference.core.engine_load import alone_s

LOAD = EngineLoad(step_s=0.010, step_added_s=0.002)


@pytest.mark.parametrize(
    ("batch", "load", "expected"),
    [
        (1.0, LOAD, 6.0),
        (4.0, LOAD, 4.0),  # 12 ms a step for one, 18 ms for four
        (0.5, LOAD, 6.0),
        (4.0, EngineLoad(step_added_s=0.002), 1.5),
        (4.0, EngineLoad(step_s=0.010), 6.0),
        (4.0, EngineLoad(), 6.0),
        (4.0, None, 6.0),
    ],
)
def test_engine_time_is_scaled_by_the_step_of_one_over_that_of_the_batch(batch, load, expected):
    assert alone_s(6.0, batch=batch, load=load) == pytest.approx(expected)


def test_the_mean_batch_is_that_of_the_time_since_a_moment():
    clock = BatchClock()
    clock.note(1)
    begin = clock.now()
    time.sleep(0.02)
    clock.note(5)
    time.sleep(0.02)
    clock.note(1)
    assert 1.5 < clock.mean_since(begin) < 5.0
    assert clock.mean_since(BatchMoment(clock.now().at_s + 1, 0.0)) == 1.0


def test_an_engine_that_says_nothing_keeps_its_last_measurement():
    clock = BatchClock()
    clock.note_load(LOAD)
    clock.note_load(None)
    assert clock.load == LOAD
