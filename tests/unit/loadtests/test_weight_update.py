"""What the load test of new weights would say of pauses that are longer than those measured."""

import pytest
from measurement import Measurement
from weight_lanes import Update
from weight_update import pause_rows

MEASURED = {1: (0.19, 0.59, 0.47), 2: (0.19, 0.71, 0.52), 3: (0.20, 0.73, 0.50)}
"""By engines: pauses by relay, by broadcast and through one group; loadtests/README.md has them."""
TRANSFER_S = {1: 1.4, 2: 0.95, 3: 1.2}


def update(pause_s: float, *, transfer_s: float) -> Update:
    served_s = max(transfer_s, pause_s + 0.2)
    return Update(served_s=served_s, transfer_s=transfer_s, pause_s=pause_s, sent_bytes=0)


def broken(engines: int, *, relay: float = 1.0, shared: float = 1.0) -> list[str]:
    """The metrics beyond their thresholds if these pauses were so many times those measured."""
    relay_s, broadcast_s, shared_s = MEASURED[engines]
    transfer_s = TRANSFER_S[engines]
    measurement = Measurement(name="weight_update", question="?")
    pause_rows(
        measurement,
        f"engines_{engines}",
        relays=[update(relay_s * relay, transfer_s=transfer_s)],
        broadcasts=[update(broadcast_s, transfer_s=broadcast_s)],
        shared=[update(shared_s * shared, transfer_s=shared_s * shared)],
    )
    return [line.split()[1] for line in measurement.broken_thresholds()]


@pytest.mark.parametrize("engines", MEASURED)
def test_the_pauses_that_were_measured_are_within_their_thresholds(engines):
    assert broken(engines) == []


@pytest.mark.parametrize("engines", MEASURED)
def test_a_pause_by_relay_ten_times_as_long_is_beyond_its_thresholds(engines):
    assert broken(engines, relay=10) == ["pause_over_transfer", "pause_over_broadcast"]


@pytest.mark.parametrize("engines", MEASURED)
def test_a_pause_through_one_group_four_times_as_long_is_beyond_its_threshold(engines):
    assert broken(engines, shared=4) == ["shared_pause_over_broadcast"]
