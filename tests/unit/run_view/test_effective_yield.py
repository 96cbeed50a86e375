"""J = trained tokens per second x reward gained per 1,000 samples, on numbers worked by hand."""

import msgspec
import pytest

from forgemq_run_view.effective_yield import NEWEST, effective_yield
from forgemq_run_view.state import StepPoint, Tally, VersionPoint
from forgemq_run_view.view import RunView
from tests.unit.run_view.synthetic import SyntheticRun, started


def point(step: int, *, time_s: float, **changes: object) -> StepPoint:
    made = StepPoint(
        step=step,
        lineage=1,
        time_ms=int(1000 * time_s),
        loss=0.0,
        grad_norm=1.0,
        lr=1e-3,
        loss_tokens=100,
        tree_tokens=0,
        request_tokens=0,
        append_tokens=0,
        attention_pairs=0,
        staleness_max=0,
        staleness_bound=None,
        logprob_gap_mean=None,
        logprob_gap_p99=None,
        logprob_gap_max=None,
        gap_entries=0,
        kl_k3=0.0,
        entropy=0.0,
        capped_share=0.0,
        ratio_p99=0.0,
        duration_s=0.0,
        samples=50,
    )
    return msgspec.structs.replace(made, **changes)


def version(number: int, *, reward: float, episodes: int = 8) -> VersionPoint:
    tally = Tally(
        episodes=episodes, success=0.0, reward=reward, outcome=0.0, speed=0.0, process=0.0
    )
    return VersionPoint(version=number, tally=tally)


def test_j_is_tokens_a_second_times_reward_gained_per_thousand_samples():
    points = [point(step, time_s=10 + step) for step in range(3)]
    versions = [version(n, reward=0.1 * (n + 1)) for n in range(3)]
    made = effective_yield(points, versions)
    # The first step's tokens have no time of their own: 200 tokens in 2 s.
    assert made.tokens_per_s == 100.0
    # Samples before versions 0, 1, 2: 0, 50, 100. 0.1 reward each 50 samples.
    assert made.reward_gain == pytest.approx(2.0)
    assert made.value == pytest.approx(200.0)
    assert made.samples == 150


def test_the_gain_is_a_least_squares_slope_weighted_by_episodes():
    points = [point(step, time_s=step, samples=1000) for step in range(2)]
    versions = [
        version(0, reward=0.0, episodes=2),
        version(1, reward=1.0, episodes=1),
        version(2, reward=0.5, episodes=1),
    ]
    # x = 0, 0, 1, 2 (thousands), y = 0, 0, 1, 0.5: means 0.75 and 0.375;
    # sum of products 2 - 1.125 = 0.875, of squares 5 - 2.25 = 2.75.
    assert effective_yield(points, versions).reward_gain == pytest.approx(0.875 / 2.75)


def test_constraints_look_at_the_newest_steps_alone():
    old = [point(step, time_s=step, grad_norm=90.0, capped_share=1.0) for step in range(5)]
    newest = [
        point(
            5 + n,
            time_s=5 + n,
            grad_norm=1.0 + 2.0 * (n % 2),
            capped_share=0.1 * (n % 2),
            policy_age=1.0,
            loss_tokens=100 if n % 2 else 300,
        )
        for n in range(NEWEST)
    ]
    made = effective_yield([*old, *newest], [])
    assert made.newest_steps == NEWEST
    # Five of 1 and five of 3: squares of deviations add up to 10, over 9.
    assert made.grad_norm_variance == pytest.approx(10 / 9)
    assert made.capped_share == pytest.approx(0.1 * 500 / 2000)
    assert made.policy_age_steps == pytest.approx(1.0)


def test_the_slope_is_that_of_the_newest_versions_and_falls_to_zero_when_rewards_stop_to_rise():
    points = [point(step, time_s=step) for step in range(20)]
    versions = [version(n, reward=min(n, 10) / 10) for n in range(20)]
    made = effective_yield(points, versions)
    assert made.reward_slope == pytest.approx(0.0)
    assert made.reward_gain is not None
    assert made.reward_gain > 0.5


def test_what_was_not_measured_is_none_and_never_a_zero():
    for points, versions in (
        ([], []),
        ([point(0, time_s=1)], [version(0, reward=0.5)]),
        ([point(0, time_s=1), point(1, time_s=1)], []),
    ):
        made = effective_yield(points, versions)
        assert (made.value, made.tokens_per_s, made.reward_gain) == (None, None, None)
    assert effective_yield([], []).policy_age_steps is None


def test_a_run_counts_the_scored_completions_of_each_step_and_the_age_of_its_groups():
    view = RunView(started())
    for message in SyntheticRun().play(steps=3).messages:
        view.apply(message)
    state = view.state(now_ms=99_000)
    # Two groups of two episodes of two turns.
    assert [each.samples for each in state.points] == [8, 8, 8]
    assert [each.policy_age for each in state.points] == [0.0, 0.0, 0.0]
    assert state.effective_yield.samples == 24
