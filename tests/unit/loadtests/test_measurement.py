"""Which rows are beyond a threshold, and that no threshold is of a machine's own speed."""

import tomllib

import pytest
from measurement import THRESHOLDS, Measurement


def broken(case: str, metric: str, value: float, *, name: str) -> list[str]:
    measurement = Measurement(name=name, question="")
    measurement.row(case, metric, value, "x")
    return measurement.broken_thresholds()


@pytest.mark.parametrize(("value", "is_broken"), [(1.0, False), (20.0, False), (20.1, True)])
def test_a_value_above_the_most_is_broken(value, is_broken):
    lines = broken("small", "cpu_over_bare", value, name="data_path")
    assert lines == (["small cpu_over_bare = 20.1, at most 20"] if is_broken else [])


@pytest.mark.parametrize(("value", "is_broken"), [(0.5, True), (0.92, False), (1.5, False)])
def test_a_value_below_the_least_is_broken(value, is_broken):
    lines = broken("A", "flop_ratio_reached", value, name="tree_training")
    assert lines == (["A flop_ratio_reached = 0.5, at least 0.92"] if is_broken else [])


def test_a_case_that_there_is_not_is_no_success(capsys):
    assert Measurement(name="routing", question="?").finish(None) == 2
    assert capsys.readouterr().out.endswith("nothing was measured: there is no such case\n")


def test_no_threshold_is_a_rate_or_a_time():
    thresholds = tomllib.loads(THRESHOLDS.read_text())
    metrics = {m for cases in thresholds.values() for row in cases.values() for m in row}
    assert not {m for m in metrics if m.endswith(("_per_second", "_s", "_ms"))}
