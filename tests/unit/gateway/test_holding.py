"""The waits of one request share one hold."""

from contextlib import suppress

import pytest

from forgemq_gateway.holding import Hold, held_s
from forgemq_gateway.wire import Scope
from tests.unit.gateway.test_abandoned import SetClock


def test_each_wait_gets_what_the_waits_before_it_have_left():
    clock = SetClock([100.0])
    hold = Hold(3.0, clock=clock)
    scope: Scope = {}
    for took_s, left_s in ((2.0, 3.0), (0.5, 1.0), (4.0, 0.5), (0.0, 0.0)):
        with hold.waiting(scope) as may_s:
            assert may_s == pytest.approx(left_s)
            clock.at_s[0] += took_s
    assert held_s(scope) == pytest.approx(6.5)


def test_what_passes_between_two_waits_is_no_part_of_the_hold():
    clock = SetClock([0.0])
    hold = Hold(3.0, clock=clock)
    scope: Scope = {}
    clock.at_s[0] = 60.0
    with hold.waiting(scope) as may_s:
        assert may_s == 3.0


def test_a_wait_that_ends_in_an_error_counts():
    clock = SetClock([0.0])
    hold = Hold(3.0, clock=clock)
    scope: Scope = {}
    with suppress(TimeoutError), hold.waiting(scope):
        clock.at_s[0] = 3.0
        raise TimeoutError
    assert held_s(scope) == 3.0
