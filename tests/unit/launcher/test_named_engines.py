"""Engines that FORGEMQ_ENGINE_URL names: which values are refused."""

import pytest

from forgemq_launcher.upkeep.machine import MachineError
from forgemq_launcher.upkeep.named_engines import named_urls


def test_an_address_for_each_lane_is_taken() -> None:
    assert named_urls(" http://a:1/, https://b:2,", lanes=2) == ("http://a:1", "https://b:2")
    assert named_urls("", lanes=2) == ()


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("a:1", "an address looks like http://10.0.0.7:30000, got 'a:1'"),
        (
            "http://[::1,http://b:1",
            "an address looks like http://10.0.0.7:30000, got 'http://[::1'",
        ),
        ("http://a:1", "names 1 engines, the run has log.lanes=2"),
        ("http://a:1,http://a:1/", "names http://a:1 twice: one engine is one lane"),
        ("http://127.0.0.1:1,http://localhost:1", "names http://127.0.0.1:1 twice"),
    ],
)
def test_what_cannot_be_the_engines_of_the_lanes_is_refused(value: str, error: str) -> None:
    with pytest.raises(MachineError) as caught:
        named_urls(value, lanes=2)
    assert error in str(caught.value)
