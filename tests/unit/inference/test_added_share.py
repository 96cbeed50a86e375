"""What a request adds to a step, measured while other work slows the engine from outside."""

import random
from collections.abc import Callable, Iterator

import pytest

from forgemq_contracts.weights import EngineLoad
from forgemq_inference.core.added_share import AddedShare, DecodeSums
from forgemq_inference.core.engine_load import EngineCounters, EngineMeter, alone_s

AGENTS = 8
OUTPUT_TOKENS = 120
TOOL_S = 3.0
STEP_US = 10_000.0
ADDED_US = 2_000.0
MEAN_BATCH = 4.8
TRUE_SCALE = 0.612
"""Of such a batch: a step of one request takes 12 ms, of 4.8 requests 19.6 ms."""

Slowdown = Callable[[float], float]


def drawn(seed: int, *, every_s: float, since_s: float = 0.0) -> Slowdown:
    """1 to 2, drawn again every `every_s`; heartbeats come at whole seconds."""

    dice = random.Random(seed)
    factors = [1 + dice.random() for _ in range(1000)]
    return lambda now_s: factors[int((now_s + since_s) / every_s)]


SLOWDOWNS: dict[str, Callable[[int], Slowdown]] = {
    "none": lambda seed: lambda now_s: 1.0,
    "each second": lambda seed: drawn(seed, every_s=1.0),
    "each second, half a second later": lambda seed: drawn(seed, every_s=1.0, since_s=0.5),
    "ten seconds long": lambda seed: drawn(seed, every_s=10.0, since_s=0.4),
    "a training step in turns": lambda seed: lambda now_s: 2.0 if now_s % 20 < 10.3 else 1.0,
}


def decoding(slowdown: Slowdown, *, seed: int, seconds: int) -> Iterator[EngineCounters]:
    """An engine's counters each second: eight agents sample, and then wait for their tools."""
    dice = random.Random(seed)
    until_s = [dice.uniform(0, TOOL_S) for _ in range(AGENTS)]
    left = [0] * AGENTS
    sums = [0.0] * 6
    now_s, beats = 0.0, 0
    while beats < seconds:
        for agent in range(AGENTS):
            if not left[agent] and until_s[agent] <= now_s:
                left[agent] = max(8, int(dice.expovariate(1 / OUTPUT_TOKENS)))
        sampling = [agent for agent in range(AGENTS) if left[agent]]
        if not sampling:
            now_s = min(until_s)
            continue
        batch = len(sampling)
        us = (STEP_US + ADDED_US * batch) * slowdown(now_s) * dice.gauss(1, 0.03)
        now_s += us / 1e6
        new = (1, batch, us, batch * batch, batch * us, batch)
        sums = [old + each for old, each in zip(sums, new, strict=True)]
        for agent in sampling:
            left[agent] -= 1
            if not left[agent]:
                until_s[agent] = now_s + dice.expovariate(1 / TOOL_S)
        while beats + 1 <= now_s:
            beats += 1
            yield EngineCounters(decode_moments=list(sums))


def scale(load: EngineLoad) -> float:
    return alone_s(1.0, batch=MEAN_BATCH, load=load)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOWDOWNS)
def test_a_slowdown_from_outside_is_not_taken_for_the_cost_of_a_batch(name: str) -> None:
    """The last two of ten minutes; a line over one minute gives 0.21 to 0.74 here."""
    for seed in range(8):
        meter = EngineMeter()
        heard = decoding(SLOWDOWNS[name](seed), seed=seed, seconds=600)
        last = [scale(meter.observe(counters)) for counters in heard][-120:]
        assert (min(last), max(last)) == pytest.approx((TRUE_SCALE,) * 2, abs=0.06)


def test_the_time_of_a_step_follows_a_slowdown_within_a_minute() -> None:
    meter = EngineMeter()
    for counters in decoding(lambda now_s: 2.0 if now_s > 200 else 1.0, seed=0, seconds=300):
        load = meter.observe(counters)
    assert load.step_s == pytest.approx(0.020, rel=0.05)
    assert load.step_added_s == pytest.approx(0.004, rel=0.05)


def sums(*steps: tuple[int, float]) -> DecodeSums:
    """Of steps of so many requests and microseconds."""
    return DecodeSums(
        len(steps),
        sum(b for b, _ in steps),
        sum(us for _, us in steps),
        sum(b * b for b, _ in steps),
        sum(b * us for b, us in steps),
    )


def test_while_the_error_is_large_the_last_value_with_a_small_one_is_kept() -> None:
    """One heartbeat says that 64 requests take ten times as long as they do."""
    share = AddedShare()
    for _ in range(20):
        share.note(sums((1, 12e3), (4, 18e3), (2, 14e3)))
    share.note(sums((1, 12e3), (64, 1_380e3)))
    assert share.value == pytest.approx(2 / 12)


def test_what_an_engine_did_before_gives_the_first_value_and_counts_no_more() -> None:
    """In its life larger batches fell into slow times: 1 and 8 requests, 12 and 52 ms."""
    share = AddedShare()
    share.note(sums(*[(1, 12e3), (8, 52e3)] * 10_000))
    assert share.value > 0.4
    for _ in range(20):
        share.note(sums((1, 12e3), (4, 18e3)))
    assert share.value == pytest.approx(2 / 12)
