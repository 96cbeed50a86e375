"""Rates of an engine from its counters."""

import pytest

from forgemq_contracts.weights import EngineLoad
from forgemq_inference.core.engine_load import EngineCounters, EngineMeter


def moments(*steps: tuple[int, float]) -> list[float]:
    """The sums over decoding steps with so many requests and microseconds each."""
    return [
        float(len(steps)),
        float(sum(b for b, _ in steps)),
        sum(t for _, t in steps),
        float(sum(b * b for b, _ in steps)),
        sum(b * t for b, t in steps),
        float(sum(b for b, _ in steps)),
    ]


def line(*batches: int) -> list[tuple[int, float]]:
    """Steps of 10 ms and 2 ms a request."""
    return [(b, 10_000.0 + 2_000.0 * b) for b in batches]


def test_before_anything_was_done_there_are_no_rates() -> None:
    load = EngineMeter().observe(
        EngineCounters(num_waiting_uncached_tokens=7, num_used_tokens=30, max_total_num_tokens=100)
    )
    assert load == EngineLoad(waiting_tokens=7, used_tokens=30, capacity_tokens=100)


def test_rates_are_those_since_the_oldest_counters_that_are_kept() -> None:
    """The engine becomes twice as fast; what a request adds is the same part of a step."""
    meter = EngineMeter()
    meter.observe(
        EngineCounters(
            total_prefill_uncached_tokens=1000,
            total_prefill_busy_us=1_000_000,
            decode_moments=moments(*line(1, 2)),
        )
    )
    load = meter.observe(
        EngineCounters(
            total_prefill_uncached_tokens=5000,
            total_prefill_busy_us=1_500_000,
            decode_moments=moments(*line(1, 2), *[(b, us / 2) for b, us in line(4, 8, 16)]),
        )
    )
    assert load.prefill_tokens_per_s == pytest.approx(8000)
    assert load.step_s == pytest.approx(0.005)
    assert load.step_added_s == pytest.approx(0.001)


def test_an_engine_that_is_idle_has_the_rates_of_its_past() -> None:
    meter = EngineMeter()
    counters = EngineCounters(
        total_prefill_uncached_tokens=1000,
        total_prefill_busy_us=500_000,
        decode_moments=moments(*line(1, 4, 9)),
    )
    for _ in range(100):
        load = meter.observe(counters)
    assert load.prefill_tokens_per_s == pytest.approx(2000)
    assert load.step_s == pytest.approx(0.01)
    assert load.step_added_s == pytest.approx(0.002)


def test_batches_of_one_size_say_how_long_a_step_is_and_not_what_a_request_adds() -> None:
    load = EngineMeter().observe(EngineCounters(decode_moments=moments((4, 9e3), (4, 11e3))))
    assert (load.step_s, load.step_added_s) == (pytest.approx(0.01), 0.0)


def test_a_larger_batch_is_never_taken_for_a_faster_one() -> None:
    load = EngineMeter().observe(EngineCounters(decode_moments=moments((1, 20e3), (8, 10e3))))
    assert (load.step_s, load.step_added_s) == (pytest.approx(0.015), 0.0)


def test_a_step_without_requests_takes_no_negative_time() -> None:
    load = EngineMeter().observe(EngineCounters(decode_moments=moments((2, 1e3), (4, 9e3))))
    assert load.step_s == 0.0
    assert load.step_added_s == pytest.approx(10e3 / 6 / 1e6)


def test_counters_that_fall_are_of_another_start() -> None:
    meter = EngineMeter()
    meter.observe(
        EngineCounters(
            total_prefill_uncached_tokens=10_000,
            total_prefill_busy_us=1_000_000,
            decode_moments=moments(*line(*range(1, 50))),
        )
    )
    load = meter.observe(
        EngineCounters(
            total_prefill_uncached_tokens=100,
            total_prefill_busy_us=100_000,
            decode_moments=moments((1, 12e3), (2, 14e3)),
        )
    )
    assert load.prefill_tokens_per_s == pytest.approx(1000)
    assert load.step_s == pytest.approx(0.01)
