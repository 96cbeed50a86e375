"""pass@k is unbiased, and its interval covers the truth at least as often as it says."""

import itertools
import math
import random

import pytest

from forgemq_run_view.pass_at_k import TaskSamples, pass_at_k, pass_rates, wilson


def task(number: int, samples: int, successes: int) -> TaskSamples:
    return TaskSamples(
        task_number=number, group_id=f"g-{number}", samples=samples, successes=successes
    )


@pytest.mark.parametrize(
    ("samples", "successes", "k", "expected"),
    [(4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 1, 4, 1.0), (4, 0, 4, 0.0), (5, 2, 3, 0.9), (2, 2, 1, 1)],
)
def test_the_estimate_is_the_share_of_draws_of_k_with_a_success(samples, successes, k, expected):
    flags = [index < successes for index in range(samples)]
    draws = list(itertools.combinations(flags, k))
    assert pass_at_k(samples, successes, k=k) == pytest.approx(expected)
    assert pass_at_k(samples, successes, k=k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_its_mean_over_all_outcomes_is_the_probability_that_one_of_k_is_right(k):
    n, p = 5, 0.3
    mean = math.fsum(
        math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k=k) for c in range(n + 1)
    )
    assert mean == pytest.approx(1 - (1 - p) ** k)


def test_more_samples_than_there_are_or_more_successes_are_refused():
    for samples, successes, k in ((3, 1, 4), (3, 4, 1), (3, 1, 0)):
        with pytest.raises(ValueError, match="k must be 1 to 3 samples"):
            pass_at_k(samples, successes, k=k)


def test_wilsons_interval_has_its_published_values_and_a_width_at_the_edges():
    # 10 of 20: 0.2993 to 0.7007 (Newcombe 1998, method 3).
    assert wilson(0.5, 20) == pytest.approx((0.2993, 0.7007), abs=1e-4)
    # 0 of 10: 0 to z^2 / (10 + z^2).
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(1.0, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)


@pytest.mark.parametrize("k", [1, 4])
def test_the_interval_covers_the_true_rate_in_95_of_100_evaluations(k):
    draw = random.Random(5)
    truth = {1: 0.5, 4: 1 - math.fsum((1 - p) ** 4 for p in (0.2, 0.8)) / 2}[k]
    covered = 0
    for _ in range(1000):
        tasks = []
        for number in range(30):
            p = draw.choice((0.2, 0.8))
            tasks.append(task(number, 8, sum(draw.random() < p for _ in range(8))))
        [rate] = [each for each in pass_rates(tasks, samples=8) if each.k == k]
        covered += rate.low <= truth <= rate.high
    assert covered >= 940


def test_rates_are_over_tasks_with_enough_unmasked_samples():
    rates = pass_rates([task(0, 6, 3), task(1, 2, 0), task(2, 0, 0)], samples=6)
    assert [(each.k, each.tasks) for each in rates] == [(1, 2), (2, 2), (4, 1), (6, 1)]
    assert rates[0].rate == pytest.approx(0.25)
    assert rates[1].rate == pytest.approx((1 - 3 / 15) / 2)
    assert rates[3].rate == 1.0
    assert pass_rates([task(0, 0, 0)], samples=2) == ()
