"""Returns and advantages of groups, in closed form."""

import math

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forgemq_contracts.groups import ScoredGroup
from forgemq_contracts.run import Rewards
from forgemq_reward.core.groups import GroupState, scored_group
from tests.unit.reward.records import finished_episode, graded_episode
from tests.unit.reward.scoring import advantages, score

# Values.


def test_advantage_is_the_return_from_a_turn_on_minus_the_groups_mean_of_it():
    """Final parts: 1 + 0.5 * 0.4 = 1.2, 0, 0. From turn 0 on: 1.1, 0.2, 0; 1: 1.1, 0, 0; 2: 1.2."""
    scored = score(
        [finished_episode(0, size=3, turns=3), *(finished_episode(i, size=3) for i in (1, 2))],
        [
            graded_episode(0, outcome=1.0, speed=0.4, process=[0.0, -0.2, 0.0]),
            graded_episode(1, process=[0.4]),
            graded_episode(2),
        ],
        alpha=0.5,
        beta=0.5,
    )
    assert advantages(scored) == [
        (0, 0, round(1.1 - 1.3 / 3, 9)),
        (0, 1, round(1.1 - 1.1 / 3, 9)),
        (0, 2, round(1.2 - 1.2 / 3, 9)),
        (1, 0, round(0.2 - 1.3 / 3, 9)),
        (2, 0, round(0.0 - 1.3 / 3, 9)),
    ]
    assert [round(c.return_to_go, 9) for c in scored.completions] == [1.1, 1.1, 1.2, 0.2, 0.0]
    assert [round(e.total, 9) for e in scored.episodes] == [1.1, 0.2, 0.0]
    assert scored.episodes[0].process == -0.2
    assert scored.completions[1].offset == 1
    assert scored.not_trainable == ""


def test_leave_one_out_compares_with_the_others_only():
    scored = score(
        [finished_episode(i, size=3) for i in range(3)],
        [graded_episode(i, outcome=float(i)) for i in range(3)],
        baseline="leave_one_out",
    )
    assert advantages(scored) == [(0, 0, -1.5), (1, 0, 0.0), (2, 0, 1.5)]


def test_completions_are_ordered_by_sequence_whatever_the_manifest_says():
    episode = finished_episode(0, turns=3)
    mixed = msgspec.structs.replace(episode, manifest=episode.manifest[::-1])
    grades = [graded_episode(0, outcome=1.0, process=[0.5, 0.25, 0.0]), graded_episode(1)]
    assert score([mixed, finished_episode(1)], grades) == score(
        [episode, finished_episode(1)], grades
    )


def test_masked_episodes_count_in_no_baseline_and_bring_no_completions():
    scored = score(
        [
            finished_episode(0, size=4),
            finished_episode(1, size=4, status="failed"),
            finished_episode(2, size=4),
            finished_episode(3, size=4),
        ],
        [
            graded_episode(0, outcome=1.0),
            graded_episode(2),
            graded_episode(3, outcome=100.0, is_masked=True),
        ],
    )
    assert advantages(scored) == [(0, 0, 0.5), (2, 0, -0.5)]
    assert [episode.is_masked for episode in scored.episodes] == [False, True, False, True]
    assert scored.episodes[3].total == 0.0


def test_a_reward_for_a_completion_outside_the_manifest_masks_the_episode():
    grades = [graded_episode(i, outcome=float(i), process=[0.0, 1.0]) for i in range(3)]
    grades[2] = graded_episode(2, outcome=1.0)
    scored = score([finished_episode(i, size=3, turns=2 - i // 2) for i in range(3)], grades)
    assert [episode.is_masked for episode in scored.episodes] == [False, False, False]
    bad = score([finished_episode(i, size=3, turns=1) for i in range(3)], grades)
    assert [episode.is_masked for episode in bad.episodes] == [True, True, False]


@pytest.mark.parametrize(("gap", "reason"), [(1.9e-6, "zero_variance"), (2.1e-6, "")])
def test_zero_variance_is_every_advantage_below_a_millionth(gap, reason):
    scored = score(
        [finished_episode(0), finished_episode(1)],
        [graded_episode(0, outcome=gap), graded_episode(1)],
    )
    assert scored.not_trainable == reason


def test_equal_episodes_teach_nothing_whatever_they_earned_on_the_way():
    """Five turns with a reward each, all successful: no turn was better or worse than another."""
    scored = score(
        [finished_episode(i, size=4, turns=5) for i in range(4)],
        [graded_episode(i, outcome=1.0, process=[0.2, -0.5, 1.0, 0.2, 0.2]) for i in range(4)],
    )
    assert scored.not_trainable == "zero_variance"


@given(
    st.integers(2, 17),
    st.lists(st.floats(-1e10, 1e10), max_size=6),
    st.floats(-1e11, 1e11),
    st.sampled_from(["mean", "leave_one_out"]),
)
@example(3, [], 99_999_999_999.9, "mean")
def test_equal_episodes_teach_nothing_whatever_the_size_of_their_rewards(
    size, process, outcome, baseline
):
    """The mean of equal numbers of 1e11 differs from them by float64's rounding, 1e-5."""
    scored = score(
        [finished_episode(i, size=size, turns=len(process) + 1) for i in range(size)],
        [graded_episode(i, outcome=outcome, process=process) for i in range(size)],
        baseline=baseline,
    )
    assert scored.not_trainable == "zero_variance"


def test_equal_totals_still_teach_if_they_were_earned_in_different_turns():
    scored = score(
        [finished_episode(0, turns=2), finished_episode(1, turns=2)],
        [graded_episode(0, process=[-0.5, 0.5]), graded_episode(1, process=[0.0, 0.0])],
    )
    assert advantages(scored) == [(0, 0, 0.0), (0, 1, 0.25), (1, 0, 0.0), (1, 1, -0.25)]


def test_a_penalty_that_all_paid_does_not_reward_what_failed_after_it():
    """A malformed first call in all four; one succeeds: the failures' later turns are below it."""
    scored = score(
        [finished_episode(i, size=4, turns=2) for i in range(4)],
        [graded_episode(i, outcome=float(i == 0), process=[-0.5, 0.0]) for i in range(4)],
    )
    assert [a for _, _, a in advantages(scored)] == [0.75, 0.75, *[-0.25] * 6]


def test_a_shorter_episode_is_compared_by_how_it_ended():
    """Beyond its last turn an episode has its outcome and no process reward to come."""
    scored = score(
        [finished_episode(0, turns=1), finished_episode(1, turns=3)],
        [graded_episode(0, outcome=1.0), graded_episode(1, process=[0.0, 0.0, 0.5])],
    )
    assert advantages(scored) == [(0, 0, 0.25), (1, 0, -0.25), (1, 1, -0.25), (1, 2, -0.25)]


def test_a_leave_one_out_baseline_is_that_of_the_same_turn_too():
    scored = score(
        [finished_episode(i, size=3, turns=2) for i in range(3)],
        [graded_episode(i, outcome=float(i), process=[0.5, 0.25]) for i in range(3)],
        baseline="leave_one_out",
    )
    assert advantages(scored) == [
        *((0, 0, -1.5), (0, 1, -1.5), (1, 0, 0.0), (1, 1, 0.0), (2, 0, 1.5), (2, 1, 1.5))
    ]


@pytest.mark.parametrize("kind", ["mean", "leave_one_out"])
def test_an_episode_without_completions_is_compared_with_nobody(kind):
    """It ended before the policy was asked: its outcome says nothing about the policy."""
    ends = [finished_episode(0, size=3), finished_episode(1, size=3)]
    ends.append(finished_episode(2, size=3, turns=0))
    grades = [graded_episode(0, outcome=1.0), graded_episode(1), graded_episode(2, outcome=-9.0)]
    factor = 1.0 if kind == "mean" else 2.0
    assert advantages(score(ends, grades, baseline=kind)) == [
        (0, 0, 0.5 * factor),
        (1, 0, -0.5 * factor),
    ]
    alone = score(
        [finished_episode(0), finished_episode(1, turns=0)],
        [graded_episode(0, outcome=1.0), graded_episode(1)],
        baseline=kind,
    )
    assert alone.not_trainable == "zero_variance"


# Shuffled returns.


def test_shuffled_returns_are_the_same_totals_paid_at_the_end_of_other_episodes():
    group = GroupState(
        group_id="g-1",
        episodes=tuple(finished_episode(i, size=8, turns=2) for i in range(8)),
        grades=tuple(graded_episode(i, outcome=float(i), process=[-0.5, 0.0]) for i in range(8)),
    )
    shuffled = scored_group(group, settings=Rewards(shuffle_returns=True))
    straight = scored_group(group, settings=Rewards())
    paid = [c.return_to_go for c in shuffled.completions]
    assert paid[::2] == paid[1::2], "only the end is paid"
    assert sorted(paid[::2]) == [i - 0.5 for i in range(8)]
    assert paid[::2] != [i - 0.5 for i in range(8)]
    assert math.isclose(sum(c.advantage for c in shuffled.completions), 0.0, abs_tol=1e-9)
    assert shuffled.episodes == straight.episodes
    assert shuffled == scored_group(group, settings=Rewards(shuffle_returns=True))


def test_every_group_is_shuffled_in_a_different_order():
    def dealt(name: str) -> list[float]:
        group = GroupState(
            group_id=name,
            episodes=tuple(finished_episode(i, size=8, group=name) for i in range(8)),
            grades=tuple(graded_episode(i, outcome=float(i), group=name) for i in range(8)),
        )
        scored = scored_group(group, settings=Rewards(shuffle_returns=True))
        return [completion.return_to_go for completion in scored.completions]

    assert len({tuple(dealt(f"g-{number}")) for number in range(20)}) == 20


# Properties.

TOTALS = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=9)


EPISODES = st.lists(
    st.tuples(st.floats(-1e3, 1e3), st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=4)),
    min_size=2,
    max_size=6,
)


@given(EPISODES, st.integers(0, 3), st.floats(-1e3, 1e3))
def test_a_reward_that_every_episode_earned_in_a_turn_changes_no_advantage(episodes, turn, extra):
    """Each episode has at least `turn + 1` turns; what all of them earned there cancels."""

    def scored(bonus: float) -> ScoredGroup:
        rows = [[*values, *[0.0] * (turn + 1 - len(values))] for _, values in episodes]
        size = len(rows)
        ends = [finished_episode(i, size=size, turns=len(row)) for i, row in enumerate(rows)]
        grades = []
        for index, ((outcome, _), row) in enumerate(zip(episodes, rows, strict=True)):
            paid = [value + bonus * (t == turn) for t, value in enumerate(row)]
            grades.append(graded_episode(index, outcome=outcome, process=paid))
        return score(ends, grades)

    without, with_bonus = scored(0.0), scored(extra)
    left = [c.advantage for c in without.completions]
    right = [c.advantage for c in with_bonus.completions]
    if left and right:  # Else every advantage is below the least that counts.
        assert right == pytest.approx(left, abs=1e-6)


@given(TOTALS)
def test_advantages_of_single_turn_episodes_sum_to_zero(totals):
    scored = score(
        [finished_episode(i, size=len(totals)) for i in range(len(totals))],
        [graded_episode(i, outcome=total) for i, total in enumerate(totals)],
    )
    assert abs(sum(c.advantage for c in scored.completions)) < 1e-6
