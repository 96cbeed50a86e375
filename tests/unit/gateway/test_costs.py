"""What a request costs on a lane, in seconds, by hand."""

import pytest

from forgemq_contracts.weights import EngineLoad
from forgemq_gateway.core.costs import (
    LaneWork,
    OutputLength,
    Rates,
    cost_s,
    mean_rates,
    rates_of,
)

RATES = Rates(prefill_tokens_per_s=1000.0, step_s=0.01, step_added_s=0.001)


@pytest.mark.parametrize(
    ("work", "uncached", "expected"),
    [
        # A pass of its own, 10 ms, reads 0.5 s; then 100 steps of 11 ms.
        (LaneWork(), 500, 0.01 + 0.5 + 1.1),
        # Steps of 13 ms, and each of the two others waits for the pass, 0.5 s and 100 times 1 ms.
        (LaneWork(in_flight=2), 500, 0.01 + 0.5 + 1.3 + 2 * (0.01 + 0.5 + 0.1)),
        # What was given before is read first, and in the same pass.
        (LaneWork(unread_tokens=3000), 500, 3.0 + 0.5 + 1.1),
        # 200 tokens have no place.
        (LaneWork(used_tokens=700, capacity_tokens=1000), 500, 0.01 + 0.5 + 1.1 + 0.2),
        (LaneWork(used_tokens=500, capacity_tokens=1000), 500, 0.01 + 0.5 + 1.1),
        (LaneWork(used_tokens=700), 500, 0.01 + 0.5 + 1.1),
        (LaneWork(), 0, 0.01 + 1.1),
    ],
    ids=["idle", "others", "queue", "overflow", "just fits", "unknown size", "all cached"],
)
def test_each_part_of_the_cost(work: LaneWork, uncached: int, expected: float) -> None:
    cost = cost_s(RATES, work, uncached_tokens=uncached, output_tokens=100.0)
    assert cost == pytest.approx(expected)


def test_a_lane_is_measured_when_both_kinds_of_step_are() -> None:
    assert rates_of(None) is None
    assert rates_of(EngineLoad(prefill_tokens_per_s=1000.0)) is None
    assert rates_of(EngineLoad(step_s=0.01)) is None
    load = EngineLoad(prefill_tokens_per_s=1000.0, step_s=0.01, step_added_s=0.001)
    assert rates_of(load) == RATES


def test_a_lane_without_measurements_counts_as_the_mean_of_the_others() -> None:
    slow = Rates(prefill_tokens_per_s=500.0, step_s=0.03, step_added_s=0.003)
    assert mean_rates([RATES, slow]) == Rates(
        prefill_tokens_per_s=750.0, step_s=0.02, step_added_s=0.002
    )
    assert mean_rates([]) == Rates()


def test_the_mean_length_begins_with_the_first_completion_and_follows_the_newest() -> None:
    length = OutputLength()
    length.note(1000)
    assert length.tokens == 1000
    for _ in range(300):
        length.note(10)
    assert length.tokens == pytest.approx(10, abs=3)
