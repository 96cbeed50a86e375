"""Kill a transform task anywhere; the published log is the one of a run without a crash."""

import pytest

from tests.simulation.cases import CASES
from tests.simulation.harness import CRASH_POINTS, Crashes, published

SEEDS_A_TEST = 25

pytestmark = [pytest.mark.simulation, pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.mark.parametrize("first_seed", range(0, 100, SEEDS_A_TEST))
@pytest.mark.parametrize("make_case", CASES, ids=lambda make: make.__name__)
async def test_crashes_never_change_what_was_published(make_case, first_seed):
    case = make_case()
    expected = await published(case, Crashes(0, probability=0.0))
    assert sum(map(len, expected.values())) > 0
    counts = dict.fromkeys(CRASH_POINTS, 0)
    for seed in range(first_seed, first_seed + SEEDS_A_TEST):
        crashes = Crashes(seed, probability=0.1)
        assert await published(case, crashes) == expected, f"reproduce with seed={seed}"
        for point, count in crashes.counts.items():
            counts[point] += count
    assert min(counts.values()) > 0, f"a kind of crash was not tried: {counts}"
