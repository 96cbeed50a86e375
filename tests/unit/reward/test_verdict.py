"""From a verdict to a grade: what masks an episode, and what the agent's own rewards mean."""

import math

import pytest

from forgemq_contracts.episodes import ReportedReward
from forgemq_contracts.grading import GradingCompletion
from forgemq_reward.core.verdict import Verdict, graded_episode
from tests.unit.reward.records import completion_id, finished_episode


def grade(verdict: Verdict, *, turns: int = 2, rewards=(), completions=()):
    episode = finished_episode(0, turns=turns, rewards=rewards)
    return graded_episode(
        episode, verdict, grader="m:f", grader_version="1", completions=completions
    )


def reported(name: str, value: float, sequence: int | None = None) -> ReportedReward:
    return ReportedReward(
        reward_id=f"{name}-{value}",
        name=name,
        value=value,
        completion_id=None if sequence is None else completion_id(0, sequence),
    )


def test_functions_decide_if_they_are_named():
    graded = grade(
        Verdict(outcome=1.0, speed=0.5, process=(0.0, -0.1)),
        rewards=[reported("outcome", 9.0), reported("format", 9.0, 0)],
    )
    assert (graded.outcome, graded.speed, graded.is_masked) == (1.0, 0.5, False)
    assert [(p.completion_id, p.value) for p in graded.process] == [
        (completion_id(0, 0), 0.0),
        (completion_id(0, 1), -0.1),
    ]


def test_without_functions_the_agents_own_rewards_count():
    graded = grade(
        Verdict(),
        rewards=[
            reported("outcome", 0.5),
            reported("outcome", 0.25),
            reported("speed", 0.125),
            reported("curiosity", 7.0),
            reported("format", -0.5, 1),
        ],
    )
    assert (graded.outcome, graded.speed) == (0.75, 0.125)
    assert [(p.completion_id, p.value) for p in graded.process] == [(completion_id(0, 1), -0.5)]


def test_without_anything_the_outcome_is_zero():
    assert grade(Verdict()).outcome == 0.0


@pytest.mark.parametrize(
    ("verdict", "detail"),
    [
        (Verdict(error="outcome raised KeyError: 'total'"), "outcome raised KeyError: 'total'"),
        (Verdict(outcome=math.nan), "the outcome must be from -1e+12 to 1e+12, got nan"),
        (Verdict(outcome=1e39), "the outcome must be from -1e+12 to 1e+12, got 1e+39"),
        (
            Verdict(outcome=1.0, speed=math.inf),
            "the speed must be from -1e+12 to 1e+12, got inf",
        ),
        (
            Verdict(process=(1.0,)),
            "process returned 1 values for 2 completions: "
            "it must return one per completion, in their order",
        ),
        (
            Verdict(process=(1.0, -math.inf)),
            f"the process reward of {completion_id(0, 1)} must be from -1e+12 to 1e+12, got -inf",
        ),
    ],
)
def test_what_is_no_grade_masks_the_episode_and_says_why(verdict, detail):
    graded = grade(verdict)
    assert (graded.is_masked, graded.detail) == (True, detail)
    assert (graded.outcome, graded.speed, graded.process) == (0.0, 0.0, ())


def test_a_reward_for_a_completion_that_did_not_count_masks_the_episode():
    graded = grade(Verdict(outcome=1.0), rewards=[reported("format", 1.0, 5)])
    assert graded.detail == f"a reward names completion {completion_id(0, 5)}, which did not count"


@pytest.mark.parametrize("name", ["outcome", "speed"])
@pytest.mark.parametrize(
    ("values", "got"),
    [
        ((1e308,), "1e+308"),
        ((1.7e308, 1.6e308), "1.7e+308"),
        ((math.inf, -math.inf), "inf"),
        ((1e12, -1e13, 1e12), "-10000000000000.0"),
        ((1e12, 5e11), "1500000000000.0"),
    ],
)
def test_reported_rewards_out_of_bounds_mask_the_episode_and_name_the_value(name, values, got):
    graded = grade(Verdict(), rewards=[reported(name, value) for value in values])
    assert graded.is_masked
    assert graded.detail == f"the {name} must be from -1e+12 to 1e+12, got {got}"


def test_the_largest_rewards_count():
    graded = grade(Verdict(outcome=1e12, speed=-1e12, process=(1e12, -1e12)))
    assert not graded.is_masked
    assert (graded.outcome, graded.speed) == (1e12, -1e12)
    assert [reward.value for reward in graded.process] == [1e12, -1e12]


def test_a_reported_reward_for_a_completion_is_held_to_the_bounds():
    graded = grade(Verdict(outcome=1.0), rewards=[reported("format", 1e308, 1)])
    assert graded.detail == (
        f"the process reward of {completion_id(0, 1)} must be from -1e+12 to 1e+12, got 1e+308"
    )


def test_metrics_count_turns_tokens_and_calls():
    call = {"id": "c", "type": "function", "function": {"name": "price", "arguments": "{}"}}
    completions = [
        GradingCompletion(
            completion_id=completion_id(0, sequence),
            sequence=sequence,
            text="",
            message={"role": "assistant", "content": "", "tool_calls": [call] * calls},
            messages_before=[],
            malformed_tool_calls=sequence,
            output_tokens=3,
            finish_reason="stop",
        )
        for sequence, calls in enumerate((2, 1))
    ]
    metrics = {m.name: m.value for m in grade(Verdict(), completions=completions).metrics}
    assert metrics == {
        "turns": 2.0,
        "output_tokens": 6.0,
        "duration_s": 0.0,
        "engine_s": 0.0,
        "tool_s": 0.0,
        "tool_calls": 3.0,
        "calling_turns": 2.0,
        "parallel_turns": 1.0,
        "malformed_tool_calls": 1.0,
    }
