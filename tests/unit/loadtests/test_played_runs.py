"""What load tests read of the runs that they play, and how rounds are compared."""

import json

import pytest
from context_management import tokens_of, unit_of
from gateway_baselines import Proxied, ProxiedRounds
from played_runs import curve_of

from tests.unit.episode_files.played import rows


def proxied(*costs_ms: float) -> ProxiedRounds:
    made = ProxiedRounds()
    made.rounds += [Proxied(cpu_ms=cost, per_second=1000 / cost) for cost in costs_ms]
    return made


def test_a_machine_that_is_slow_for_one_round_does_not_change_the_ratio():
    assert proxied(10.0, 30.0, 11.0).median_of([1.0, 3.0, 1.1]) == pytest.approx(0.1)


def test_one_round_is_compared_with_the_median_of_the_proxy():
    assert proxied(10.0, 30.0, 11.0).median_of([2.2]) == pytest.approx(0.2)


def test_a_curve_leaves_out_steps_whose_success_is_not_known_yet(tmp_path):
    lines = [{"step": 0, "success": 0.25}, {"step": 1, "success": None}, {"step": 2}]
    (tmp_path / "curves.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert curve_of(tmp_path) == [(0, 0.25)]


def test_of_a_step_with_two_lines_the_last_one_is_in_the_curve(tmp_path):
    lines = [{"step": 0, "success": 0.25}, {"step": 1}, {"step": 1, "success": 0.5}]
    (tmp_path / "curves.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert curve_of(tmp_path) == [(0, 0.25), (1, 0.5)]


def test_tokens_of_an_episode_count_what_a_parent_has_once():
    first, second = rows()
    # Four turns sample 4 tokens each; three of them bring 2 of context that no parent has.
    assert [tokens_of(first), tokens_of(second)] == [4 * 4 + 3 * 2, 4 + 2]


@pytest.mark.parametrize(
    ("metric", "unit"),
    [("success_greedy", "share"), ("tokens_per_episode", "tokens")],
)
def test_a_metric_has_a_unit(metric, unit):
    assert unit_of(metric) == unit
