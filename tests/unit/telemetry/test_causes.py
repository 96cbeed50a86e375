"""The errors inside nested exception groups."""

from forgemq_telemetry.causes import causes


def test_an_error_outside_any_group_is_its_own_cause():
    error = ValueError("a")
    assert causes(error) == [error]


def test_the_causes_of_nested_groups_come_in_order():
    first, second, third = ValueError("a"), KeyError("b"), KeyboardInterrupt()
    inner = ExceptionGroup("inner", [first, second])
    assert causes(BaseExceptionGroup("outer", [inner, third])) == [first, second, third]
