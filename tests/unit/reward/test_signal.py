"""The learning signal of whole groups, against a reference in float64 that uses no product code."""

from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgemq_contracts.groups import ScoredGroup
from tests.unit.reward.records import finished_episode, graded_episode
from tests.unit.reward.scoring import score

SIZES = st.floats(-100, 100, width=32)


class Rollout(NamedTuple):
    """One episode of a group, and what its graders said."""

    end: str
    outcome: float
    speed: float
    process: list[float]
    is_masked: bool


ROLLOUTS = st.builds(
    Rollout,
    st.sampled_from(["completed", "completed", "truncated", "failed"]),
    SIZES,
    SIZES,
    st.lists(SIZES, max_size=4),
    st.booleans(),
)


def _rewards(rollout: Rollout, truncated: str) -> tuple[float, float, list[float]] | None:
    """Outcome, speed and process rewards that count; None if the episode is masked."""
    if rollout.end == "failed":
        return None
    if rollout.end == "truncated" and truncated == "mask":
        return None
    if rollout.end == "truncated" and truncated == "zero":
        return 0.0, 0.0, [0.0] * len(rollout.process)
    if rollout.is_masked:
        return None
    return rollout.outcome, rollout.speed, rollout.process


def _expected(
    rollouts: list[Rollout],
    *,
    alpha: float,
    beta: float,
    baseline: str,
    truncated: str,
    discount: float,
) -> list[tuple[int, int, float]]:
    """(episode, turn, advantage) of all that trains, by brute force over pairs of episodes."""
    counted = {
        index: rewards
        for index, rollout in enumerate(rollouts)
        if (rewards := _rewards(rollout, truncated)) is not None
    }
    compared = [index for index in counted if rollouts[index].process]

    def from_turn(index: int, turn: int) -> float:
        outcome, speed, process = counted[index]
        rest = alpha * np.array(process[turn:])
        # The end belongs to the last turn; beyond it nothing is left to wait for.
        final = (outcome + beta * speed) * discount ** max(0, len(rest) - 1)
        return float(final + np.sum(rest * discount ** np.arange(len(rest))))

    found = []
    for index in compared:
        if rollouts[index].end == "truncated" and truncated == "no_loss":
            continue  # Others are compared with it; it does not train itself.
        for turn in range(len(rollouts[index].process)):
            others = [j for j in compared if baseline == "mean" or j != index or len(compared) == 1]
            mean = np.mean([from_turn(j, turn) for j in others])
            found.append((index, turn, from_turn(index, turn) - float(mean)))
    return found


def _scored(rollouts: list[Rollout], **settings: object) -> ScoredGroup:
    size = len(rollouts)
    ends, grades = [], []
    for index, rollout in enumerate(rollouts):
        status = "failed" if rollout.end == "failed" else "completed"
        end = finished_episode(index, size=size, turns=len(rollout.process), status=status)
        if rollout.end == "truncated":
            end = msgspec.structs.replace(end, truncated_by="context_full")
        ends.append(end)
        if rollout.end != "failed":
            grades.append(
                graded_episode(
                    index,
                    outcome=rollout.outcome,
                    speed=rollout.speed,
                    process=rollout.process,
                    is_masked=rollout.is_masked,
                )
            )
    return score(ends, grades, **settings)


@given(
    st.lists(ROLLOUTS, min_size=2, max_size=8),
    st.sampled_from(["mean", "leave_one_out"]),
    st.sampled_from(["grade", "zero", "mask", "no_loss"]),
    st.sampled_from([1.0, 0.5, 0.0]),
    st.sampled_from([0.25, 0.5, 1.0]),
    st.sampled_from([1.0, 0.9, 0.5]),
)
def test_a_groups_advantages_are_those_of_the_definition(
    rollouts, baseline, truncated, alpha, fraction, discount
):
    """Failed, masked, truncated and empty episodes in any mixture, closed groups among them."""
    scored = _scored(
        rollouts,
        baseline=baseline,
        truncated=truncated,
        alpha=alpha,
        beta=0.5,
        group_min_fraction=fraction,
        discount=discount,
    )
    expected = _expected(
        rollouts,
        alpha=alpha,
        beta=0.5,
        baseline=baseline,
        truncated=truncated,
        discount=discount,
    )
    kept = [rollout for rollout in rollouts if _rewards(rollout, truncated) is not None]
    is_enough = len(kept) >= max(2, fraction * len(rollouts))
    if not is_enough or not any(rollout.process for rollout in kept):
        assert scored.not_trainable == "failed"
    elif max((abs(advantage) for _, _, advantage in expected), default=0.0) < 5e-7:
        assert scored.not_trainable == "zero_variance"
    elif scored.not_trainable:
        assert max(abs(advantage) for _, _, advantage in expected) < 2e-6
    else:
        got = [(c.episode_index, c.sequence, c.advantage) for c in scored.completions]
        assert [place[:2] for place in got] == [place[:2] for place in expected]
        assert [a for *_, a in got] == pytest.approx([a for *_, a in expected], abs=1e-9)


@pytest.mark.parametrize("finished", [0, 1])
def test_a_closed_group_with_too_few_finished_siblings_never_trains(finished):
    """The gateway ends what is unfinished as failed; one of eight has nothing to compare with."""
    done = Rollout("completed", 1.0, 0.0, [0.0], is_masked=False)
    cut = Rollout("failed", 0.0, 0.0, [0.0, 0.0], is_masked=False)
    scored = _scored([done] * finished + [cut] * (8 - finished), group_min_fraction=0.01)
    assert (scored.not_trainable, scored.completions) == ("failed", ())
    assert scored.detail.startswith(f"{finished} of 8 episodes scored, 2 are needed")
