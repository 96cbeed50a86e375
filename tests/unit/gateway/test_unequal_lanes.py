"""Which lane a request goes to if lanes differ, in seconds that a reader can add up."""

import msgspec
import pytest

from forgemq_contracts.weights import EngineLoad, ReportedEngine
from forgemq_gateway.core.lane_caches import LaneCache
from forgemq_gateway.core.lanes import Lanes

# Reads 8,000 tokens in a second; a step of 20 ms, and 0.1 ms for each request.
FAST = EngineLoad(prefill_tokens_per_s=8000.0, step_s=0.02, step_added_s=0.0001)
SLOW = EngineLoad(prefill_tokens_per_s=2000.0, step_s=0.06, step_added_s=0.0003)
OUTPUT_TOKENS = 100


def heartbeat(
    lane: int, load: EngineLoad | None, *, epoch: int = 1, version: int = 3
) -> ReportedEngine:
    return ReportedEngine(
        lane=lane,
        epoch=epoch,
        url="",
        is_serving=True,
        lineage=1,
        version=version,
        running=0,
        queued=0,
        reported_ms=0,
        load=load,
    )


def lanes_with(*loads: EngineLoad | None, pool_tokens_per_s: float | None = None) -> Lanes:
    lanes = Lanes(pool_tokens_per_s=pool_tokens_per_s)
    for lane, load in enumerate(loads):
        lanes.report(heartbeat(lane, load), heard_s=0.0)
    lanes.output_length.note(OUTPUT_TOKENS)
    return lanes


def chosen(lanes: Lanes, *, tokens: int, cached: dict[LaneCache, int] | None = None) -> int:
    lane = lanes.choose(context_tokens=tokens, cached=lambda: cached or {}, now_s=0.0)
    assert lane is not None
    return lane.lane


def test_work_is_shared_as_the_lanes_are_fast() -> None:
    """A decoding step of the slow lane takes three times as long, and its prefill four times."""
    lanes = lanes_with(SLOW, FAST)
    given = {0: 0, 1: 0}
    for _ in range(400):
        lane = chosen(lanes, tokens=1000)
        lanes.enter(lane, 1)  # Its context is read at once, as far as the gateway knows.
        given[lane] += 1
    assert given[0] > 0
    assert 2.5 < given[1] / given[0] < 6


def test_a_short_context_leaves_a_slow_lane_and_a_long_one_stays_where_it_is_cached() -> None:
    """The slow lane samples for 4 s more, and to read 40,000 tokens again takes 5 s."""
    lanes = lanes_with(SLOW, FAST)
    assert chosen(lanes, tokens=8_000, cached={(0, 1, (1, 3)): 8_000}) == 1
    assert chosen(lanes, tokens=40_000, cached={(0, 1, (1, 3)): 40_000}) == 0


@pytest.mark.parametrize(
    ("pool_tokens_per_s", "version", "expected"),
    [(None, 3, 0), (100_000.0, 3, 1), (5_000.0, 3, 0), (100_000.0, 4, 0)],
    ids=["no pool", "quick pool", "slow pool", "other weights"],
)
def test_an_idle_lane_takes_over_what_it_fetches_sooner_than_the_other_is_free(
    pool_tokens_per_s: float | None, version: int, expected: int
) -> None:
    """The first lane has 30,000 tokens to read before, which takes 3.75 s. The second reads 40,000
    in 5 s, or fetches them in 0.4 or 8 s."""
    lanes = lanes_with(FAST, FAST, pool_tokens_per_s=pool_tokens_per_s)
    lanes.report(heartbeat(1, FAST, version=version), heard_s=0.0)
    lanes.enter(0, 1, uncached_tokens=30_000)
    assert chosen(lanes, tokens=40_000, cached={(0, 1, (1, 3)): 40_000}) == expected


@pytest.mark.parametrize(("tokens", "expected"), [(255, 0), (256, 1)])
def test_what_is_too_short_for_the_pool_is_read_again(tokens: int, expected: int) -> None:
    """The first lane has 360 tokens to read before, which takes 45 ms. The second begins a pass,
    20 ms, and reads 255 tokens in 32 ms or fetches 256 in 20."""
    lanes = lanes_with(FAST, FAST, pool_tokens_per_s=1e9)
    lanes.enter(0, 1, uncached_tokens=360)
    lanes.leave(0, 1)
    assert chosen(lanes, tokens=tokens, cached={(0, 1, (1, 3)): tokens}) == expected


@pytest.mark.parametrize(
    ("tokens", "expected"), [(1000, 0), (4095, 0), (4096, 1), (8191, 1), (9000, 0)]
)
def test_a_context_that_does_not_fit_an_engine_goes_to_one_with_room(
    tokens: int, expected: int
) -> None:
    """The fast engine ends at 4,096 tokens, the slow one at 8,192; beyond both nobody has room."""
    lanes = lanes_with(FAST, SLOW)
    for lane, (load, tokens_max) in enumerate(((FAST, 4096), (SLOW, 8192))):
        report = msgspec.structs.replace(heartbeat(lane, load), context_tokens_max=tokens_max)
        lanes.report(report, heard_s=0.0)
    assert chosen(lanes, tokens=tokens) == expected


def test_a_turn_joins_those_that_wait_to_be_read_where_another_pass_would_delay_all_others() -> (
    None
):
    """The first lane reads 80 tokens before, 10 ms; the second has none to read, and one more pass
    there takes 20 ms of the turn and of each of the four beside it."""
    lanes = lanes_with(FAST, FAST)
    for lane in (0, 1):
        for _ in range(4):
            lanes.enter(lane, 1)
    lanes.enter(0, 1, uncached_tokens=80)
    lanes.leave(0, 1)
    assert chosen(lanes, tokens=100) == 0
    lanes.enter(0, 1, uncached_tokens=1_000)
    lanes.leave(0, 1)
    assert chosen(lanes, tokens=100) == 1


def test_what_a_lane_was_given_and_has_not_read_delays_the_next_one() -> None:
    lanes = lanes_with(FAST, FAST)
    lanes.enter(0, 1, uncached_tokens=100_000)
    lanes.enter(1, 1)
    lanes.enter(1, 1)
    assert chosen(lanes, tokens=1000) == 1
    lanes.report(heartbeat(0, FAST), heard_s=0.0)  # It has read all of it.
    assert chosen(lanes, tokens=1000) == 0


def test_what_waits_on_a_lane_by_its_own_word_counts() -> None:
    waiting = EngineLoad(
        prefill_tokens_per_s=8000.0, step_s=0.02, step_added_s=0.0001, waiting_tokens=9000
    )
    assert chosen(lanes_with(waiting, FAST), tokens=1000) == 1


def test_a_full_cache_costs_what_must_be_read_again() -> None:
    def holding(used: int) -> EngineLoad:
        return EngineLoad(
            prefill_tokens_per_s=8000.0,
            step_s=0.02,
            step_added_s=0.0001,
            used_tokens=used,
            capacity_tokens=50_000,
        )

    assert chosen(lanes_with(holding(49_000), holding(10_000)), tokens=20_000) == 1
    assert chosen(lanes_with(holding(29_000), holding(10_000)), tokens=20_000) == 0


def test_a_lane_that_is_late_with_weights_keeps_its_cache_and_one_that_is_not_has_lost_it() -> None:
    lanes = lanes_with(FAST, FAST)
    cached: dict[LaneCache, int] = {(0, 1, (1, 3)): 40_000, (1, 1, (1, 3)): 39_000}
    assert chosen(lanes, tokens=40_000, cached=cached) == 0
    lanes.report(heartbeat(0, FAST, version=4), heard_s=0.0)
    assert chosen(lanes, tokens=40_000, cached=cached) == 1


def test_a_lane_that_restarted_has_neither_cache_nor_queue() -> None:
    lanes = lanes_with(FAST, FAST)
    cached: dict[LaneCache, int] = {(0, 1, (1, 3)): 40_000}
    for _ in range(8):
        lanes.enter(0, 1, uncached_tokens=50_000)
    lanes.report(heartbeat(0, None, epoch=2), heard_s=0.0)
    lanes.enter(1, 1)
    assert lanes.in_flight() == {0: 0, 1: 1}
    assert chosen(lanes, tokens=40_000, cached=cached) == 0


@pytest.mark.parametrize("load", [None, EngineLoad(capacity_tokens=1000)])
def test_a_lane_that_was_not_measured_counts_as_the_others(load: EngineLoad | None) -> None:
    lanes = lanes_with(SLOW, load)
    lanes.enter(0, 1)
    assert chosen(lanes, tokens=500) == 1
    lanes.enter(1, 1)
    lanes.enter(1, 1)
    assert chosen(lanes, tokens=500) == 0


def test_a_heartbeat_without_a_load_leaves_the_queue_as_it_was_until_all_is_answered() -> None:
    """What the first lane has to read takes 12.5 s."""
    lanes = lanes_with(FAST, FAST)
    lanes.enter(0, 1, uncached_tokens=100_000)
    lanes.enter(1, 1)
    assert chosen(lanes, tokens=100) == 1
    lanes.report(heartbeat(0, None), heard_s=0.0)
    assert chosen(lanes, tokens=100) == 1
    lanes.leave(0, 1)
    lanes.report(heartbeat(0, None), heard_s=0.0)
    assert chosen(lanes, tokens=100) == 0


def test_a_heartbeat_with_a_load_replaces_what_the_lane_was_given_before() -> None:
    lanes = lanes_with(FAST, FAST)
    lanes.enter(0, 1, uncached_tokens=100_000)
    lanes.enter(1, 1)
    lanes.enter(1, 1)
    lanes.report(heartbeat(0, FAST), heard_s=0.0)
    assert chosen(lanes, tokens=100) == 0
