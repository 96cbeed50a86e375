"""When a service is started again, and when the run is given up."""

from forgemq_launcher.core.restarts import RestartPolicy

POLICY = RestartPolicy(restarts_max=3, span_s=100, delay_first_s=0.5, delay_max_s=1.5)


def test_the_pause_doubles_up_to_its_limit():
    assert [POLICY.delay_s([0.0] * exits) for exits in (1, 2, 3)] == [0.5, 1.0, 1.5]


def test_the_run_is_given_up_at_one_exit_more_than_allowed():
    assert POLICY.delay_s([1.0, 2.0, 3.0, 4.0]) is None


def test_exits_long_ago_are_forgiven():
    assert POLICY.delay_s([1.0, 2.0, 3.0, 102.5]) == 1.0
    assert POLICY.delay_s([1.0, 2.0, 3.0, 500.0]) == 0.5
