"""Advantages with a discount and with the group's standard deviation, in closed form."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.reward.records import finished_episode, graded_episode
from tests.unit.reward.scoring import advantages, score


def test_a_discount_counts_each_reward_less_for_every_turn_before_it():
    """Discount 0.5, three turns. Own: 0.2 + 0.5 * (0.4 + 0.5 * 1) = 0.65, 0.9, 1. Other: 0."""
    scored = score(
        [finished_episode(0, turns=3), finished_episode(1, turns=3)],
        [graded_episode(0, outcome=1.0, process=[0.2, 0.4, 0.0]), graded_episode(1)],
        discount=0.5,
    )
    assert [round(c.return_to_go, 9) for c in scored.completions] == [0.65, 0.9, 1.0, 0, 0, 0]
    assert [a for _, _, a in advantages(scored)] == [0.325, 0.45, 0.5, -0.325, -0.45, -0.5]
    assert scored.episodes[0].total == 1.6


def test_with_a_discount_the_shorter_of_two_successes_is_better_at_its_first_turn():
    """1 after one turn against 0.9 ** 2 from the first of three; an ended episode keeps its 1."""
    scored = score(
        [finished_episode(0, turns=1), finished_episode(1, turns=3)],
        [graded_episode(0, outcome=1.0), graded_episode(1, outcome=1.0)],
        discount=0.9,
    )
    assert advantages(scored) == [(0, 0, 0.095), (1, 0, -0.095), (1, 1, -0.05), (1, 2, 0.0)]


@given(
    st.lists(st.floats(-100, 100).map(lambda value: round(value, 3)), min_size=2, max_size=9),
    st.sampled_from(["mean", "leave_one_out"]),
)
def test_group_std_divides_by_the_standard_deviation_of_the_groups_returns(outcomes, baseline):
    size = len(outcomes)
    episodes = [finished_episode(i, size=size) for i in range(size)]
    grades = [graded_episode(i, outcome=outcome) for i, outcome in enumerate(outcomes)]
    plain = score(episodes, grades, baseline=baseline)
    scaled = score(episodes, grades, baseline=baseline, advantage_scale="group_std")
    assert scaled.not_trainable == plain.not_trainable
    if not plain.not_trainable:
        deviation = statistics.stdev(outcomes)
        for one, other in zip(plain.completions, scaled.completions, strict=True):
            assert math.isclose(other.advantage, one.advantage / deviation, rel_tol=1e-9)
            assert other.return_to_go == one.return_to_go


def test_a_turn_at_which_all_returns_are_equal_teaches_nothing_beside_one_at_which_they_differ():
    """From the second turn on both earn 1, up to rounding; only the first one tells them apart."""
    scored = score(
        [finished_episode(0, turns=2), finished_episode(1, turns=2)],
        [
            graded_episode(0, outcome=1.0, process=[0.5, 0.0]),
            graded_episode(1, outcome=1.0 + 1e-9, process=[0.0, 0.0]),
        ],
        advantage_scale="group_std",
    )
    root = round(math.sqrt(0.5), 9)
    assert advantages(scored) == [(0, 0, root), (0, 1, 0.0), (1, 0, -root), (1, 1, 0.0)]


@pytest.mark.parametrize("outcome", [0.0, 0.1, 99_999_999_999.9])
def test_equal_returns_of_any_size_have_no_variance_with_group_std(outcome):
    scored = score(
        [finished_episode(i, size=3) for i in range(3)],
        [graded_episode(i, outcome=outcome) for i in range(3)],
        advantage_scale="group_std",
    )
    assert scored.not_trainable == "zero_variance"


def test_returns_near_the_largest_allowed_are_scaled_and_train():
    """Rounding at 9e11 is 0.9; half a billion of difference is no rounding."""
    scored = score(
        [finished_episode(0), finished_episode(1)],
        [graded_episode(0, outcome=9e11), graded_episode(1, outcome=9e11 - 1e9)],
        advantage_scale="group_std",
    )
    root = round(math.sqrt(0.5), 9)
    assert advantages(scored) == [(0, 0, root), (1, 0, -root)]
