"""No number that a record can hold as a reward ends the reward core or the merger."""

import math

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from forgemq_contracts.episodes import GradedEpisode, ReportedReward
from forgemq_contracts.fields import REWARD_SIZE_MAX
from forgemq_contracts.groups import MergedGroup, ScoredCompletion, ScoredGroup
from forgemq_contracts.messages import Message
from forgemq_contracts.run import Rewards
from forgemq_merger.core.merger import MergerCore
from forgemq_reward.core import RewardCore
from forgemq_reward.core.verdict import Verdict, graded_episode
from tests.unit.merger.records import finished, message
from tests.unit.reward import records
from tests.unit.reward.records import completion_id, finished_episode

TURNS = 2
FINITE = st.floats(allow_nan=False, allow_infinity=False)
LARGE = st.floats(min_value=1e11, max_value=1e13) | st.floats(min_value=1e307)
VALUES = FINITE | LARGE.filter(math.isfinite) | st.sampled_from([1e12, -1e12, 1e39, -1.7e308, 0.0])
SETTINGS = st.builds(
    Rewards,
    alpha=st.just(1.0) | VALUES,
    beta=st.just(0.1) | VALUES,
    baseline=st.sampled_from(["mean", "leave_one_out"]),
    shuffle_returns=st.booleans(),
)


@st.composite
def grades(draw: st.DrawFn) -> list[GradedEpisode]:
    return [
        records.graded_episode(
            index,
            outcome=draw(VALUES),
            speed=draw(VALUES),
            process=draw(st.lists(VALUES, max_size=TURNS)),
        )
        for index in range(draw(st.integers(2, 4)))
    ]


def scored_by(core: RewardCore, graded: list[GradedEpisode]) -> ScoredGroup:
    ended = [finished_episode(i, size=len(graded), turns=TURNS) for i in range(len(graded))]
    outputs = []
    for record in (*ended, *graded):
        outputs += core.handle(
            Message(topic="", partition=0, offset=0, timestamp_ms=0, record=record)
        )
    [output] = outputs
    assert isinstance(output.record, ScoredGroup)
    return output.record


def merged(scored: ScoredGroup) -> MergedGroup:
    core = MergerCore(4)
    for place, completion in enumerate(scored.completions):
        record = finished(place, None, 0, [1, 2], [3 + place], request_id=completion.completion_id)
        core.handle(message(record, place))
    completions = tuple(
        msgspec.structs.replace(completion, offset=place)
        for place, completion in enumerate(scored.completions)
    )
    outputs = core.handle(message(msgspec.structs.replace(scored, completions=completions)))
    summary = outputs[-1].record
    assert isinstance(summary, MergedGroup)
    return summary


def outcomes(*values: float) -> list[GradedEpisode]:
    return [records.graded_episode(index, outcome=value) for index, value in enumerate(values)]


@given(grades(), SETTINGS)
@example(outcomes(1e39, 0.0), Rewards())
@example(outcomes(1.7e308, 1.7e308), Rewards())
@example(outcomes(1.7e308, -1.7e308), Rewards())
@example([records.graded_episode(i, process=[1.7e308, -1.7e308]) for i in range(2)], Rewards())
@example([records.graded_episode(i, process=[1e12, -1e12]) for i in range(2)], Rewards(alpha=1e300))
def test_no_finite_grade_ends_the_reward_core_or_the_merger(graded, settings):
    scored = scored_by(RewardCore(partition=0, rewards=settings), graded)
    assert all(abs(c.advantage) <= 2.001 * REWARD_SIZE_MAX for c in scored.completions)
    assert all(episode.total == 0.0 for episode in scored.episodes if episode.is_masked)
    assert merged(scored).not_trainable == scored.not_trainable


@given(st.lists(FINITE | VALUES, min_size=1, max_size=4))
def test_no_finite_advantage_ends_the_merger(advantages):
    scored = ScoredGroup(
        group_id="g-1",
        domain="d",
        purpose="train",
        episodes=(),
        completions=tuple(
            ScoredCompletion(
                completion_id=completion_id(index, 0),
                offset=index,
                episode_index=index,
                sequence=0,
                return_to_go=0.0,
                advantage=advantage,
            )
            for index, advantage in enumerate(advantages)
        ),
    )
    can_train = max(map(abs, advantages)) < 3.4e38
    assert merged(scored).not_trainable == ("" if can_train else "failed")


ANY = st.floats() | VALUES


@given(
    outcome=st.none() | ANY,
    process=st.none() | st.lists(ANY, min_size=TURNS, max_size=TURNS).map(tuple),
    reported=st.lists(st.tuples(st.sampled_from(["outcome", "speed", "style"]), ANY)),
    settings=SETTINGS,
)
def test_whatever_is_returned_or_reported_becomes_a_grade_that_scores(
    outcome, process, reported, settings
):
    rewards = [
        ReportedReward(
            reward_id=f"r-{number}",
            name=name,
            value=value,
            completion_id=completion_id(0, 0) if name == "style" else None,
        )
        for number, (name, value) in enumerate(reported)
    ]
    episode = finished_episode(0, turns=TURNS, rewards=rewards)
    verdict = Verdict(outcome=outcome, process=process)
    grade = graded_episode(episode, verdict, grader="m:f", grader_version="1")
    parts = [grade.outcome, grade.speed, *(reward.value for reward in grade.process)]
    assert all(abs(part) <= REWARD_SIZE_MAX for part in parts)
    assert grade.is_masked == bool(grade.detail)
    other = records.graded_episode(1, outcome=1.0)
    scored = scored_by(RewardCore(partition=0, rewards=settings), [grade, other])
    assert merged(scored).not_trainable == scored.not_trainable


def test_a_grade_out_of_bounds_on_the_log_fails_its_group_and_tells_the_value():
    scored = scored_by(RewardCore(partition=0, rewards=Rewards()), outcomes(1.0, 1e39))
    assert [episode.is_masked for episode in scored.episodes] == [False, True]
    assert (scored.not_trainable, scored.detail) == (
        "failed",
        "1 of 2 episodes scored, 2 are needed; g-1.1.0: "
        "the outcome must be from -1e+12 to 1e+12, got 1e+39",
    )


def test_an_episode_whose_weighted_parts_are_too_large_together_is_masked():
    graded = [records.graded_episode(i, process=[6e11, -6e11]) for i in range(3)]
    graded[2] = records.graded_episode(2, process=[5e11, -5e11])
    scored = scored_by(RewardCore(partition=0, rewards=Rewards()), graded)
    assert [episode.is_masked for episode in scored.episodes] == [True, True, False]
    assert scored.detail == (
        "1 of 3 episodes scored, 2 are needed; g-1.0.0: the sizes of alpha * process, "
        "beta * speed and outcome must add up to at most 1e+12, got 1200000000000.0"
    )
