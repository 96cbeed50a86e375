"""The time of a grading: it runs, stands still while the grading waits, and runs on."""

from forgemq_reward.core.grading_clock import GradingClock


def test_the_time_in_which_a_grading_waits_is_left_to_it():
    clock = GradingClock(limit_s=10.0, now_s=100.0)
    assert clock.left_s(103.0) == 7.0
    clock.note(is_waiting=True, now_s=104.0)
    assert clock.left_s(104.0) == clock.left_s(900.0) == 6.0
    clock.note(is_waiting=True, now_s=901.0)
    clock.note(is_waiting=False, now_s=1000.0)
    assert clock.left_s(1006.0) == 0.0
    assert clock.left_s(1007.0) == -1.0
