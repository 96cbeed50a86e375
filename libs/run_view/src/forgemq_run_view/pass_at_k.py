"""pass@k of a model on held-out tasks, with intervals.

Source: Chen et al., arXiv 2107.03374, section 2.1: of n samples of a task c are correct, and
1 - C(n - c, k) / C(n, k) is an unbiased estimate of the probability that one of k is.

The intervals are Wilson's score intervals of 95 % (1927) for the mean over the tasks. A task's
estimate lies between 0 and 1, so its variance is at most p (1 - p): that of the coin flips that
Wilson's interval is made for. So it is rather too wide than too narrow, most of all for many
samples a task, and it has a width even if every task has the same result.
"""

import math
from collections.abc import Iterator, Sequence

from msgspec import Struct

CONFIDENCE = 0.95
_Z = 1.959963984540054
"""The standard normal distribution has 2.5 % above it."""


class TaskSamples(Struct, frozen=True, kw_only=True):
    """One held-out task: its unmasked episodes, and those with an outcome of at least 0.5."""

    task_number: int
    group_id: str
    samples: int
    successes: int


class PassRate(Struct, frozen=True, kw_only=True):
    """pass@k with its interval, over the tasks that have at least k samples."""

    k: int
    rate: float
    low: float
    high: float
    tasks: int


def pass_at_k(samples: int, successes: int, *, k: int) -> float:
    """Unbiased estimate that one of k samples is correct.

    Raises:
        ValueError: there are fewer than k samples, or more successes than samples.
    """
    if not 1 <= k <= samples or not 0 <= successes <= samples:
        raise ValueError(
            f"k must be 1 to {samples} samples and successes 0 to that, got {k} and {successes}"
        )
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def wilson(mean: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a mean of `count` values from 0 to 1; count is at least 1."""
    square = _Z * _Z / count
    centre = mean + square / 2
    reach = _Z * math.sqrt(mean * (1 - mean) / count + square / (4 * count))
    low, high = (centre - reach) / (1 + square), (centre + reach) / (1 + square)
    return max(0.0, min(low, mean)), min(1.0, max(high, mean))


def pass_rates(tasks: Sequence[TaskSamples], *, samples: int) -> tuple[PassRate, ...]:
    """pass@k for k = 1, 2, 4 and so on, and for `samples`, the number that was asked for.

    A k that no task has enough unmasked samples for is left out.
    """
    return tuple(rate for k in _counts(samples) if (rate := _rate(tasks, k=k)) is not None)


def _counts(samples: int) -> Iterator[int]:
    k = 1
    while k < samples:
        yield k
        k *= 2
    yield samples


def _rate(tasks: Sequence[TaskSamples], *, k: int) -> PassRate | None:
    values = [pass_at_k(t.samples, t.successes, k=k) for t in tasks if t.samples >= k]
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    low, high = wilson(mean, len(values))
    return PassRate(k=k, rate=mean, low=low, high=high, tasks=len(values))
