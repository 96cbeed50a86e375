"""Where the engine had the tokens of a context that it did not compute."""

import msgspec
import pytest

from forgemq_contracts.completions import FinishedCompletion
from forgemq_inference.core.engine_answer import EngineMeta
from forgemq_inference.core.generation import cached_by_tier, finished_completion
from tests.unit.inference.test_core import LIMITS, TIMING, answer, requested


def record_of(**meta: object) -> FinishedCompletion:
    decoded = msgspec.convert({"finish_reason": {"type": "stop"}, **meta}, EngineMeta)
    tiers = {"cached_tokens": decoded.cached_tokens}
    return finished_completion(
        requested(),
        answer(**tiers, cached_tokens_details=decoded.cached_tokens_details),
        limits=LIMITS,
        timing=TIMING,
        is_cancelled=False,
    )


@pytest.mark.parametrize(
    ("details", "tiers"),
    [
        (None, (640, 0, 0)),
        ({"device": 640, "host": 0}, (640, 0, 0)),
        (
            {"device": 128, "host": 64, "storage": 448, "storage_backend": "HiCacheFile"},
            (128, 64, 448),
        ),
    ],
)
def test_cached_tokens_are_recorded_by_the_tier_they_came_from(
    details: dict[str, object] | None, tiers: tuple[int, int, int]
) -> None:
    record = record_of(cached_tokens=640, cached_tokens_details=details)
    assert (record.cached_tokens_host, record.cached_tokens_storage) == tiers[1:]
    assert cached_by_tier(record) == dict(zip(("device", "host", "storage"), tiers, strict=True))


def test_no_tier_counts_below_zero_if_the_engine_counts_a_fetch_twice() -> None:
    """The details are of a request's first prefill, the sum may be of another."""
    details = {"device": 0, "host": 0, "storage": 640}
    record = record_of(cached_tokens=624, cached_tokens_details=details)
    assert cached_by_tier(record) == {"device": 0, "host": 0, "storage": 640}
