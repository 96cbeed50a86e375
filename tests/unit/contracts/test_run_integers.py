"""Integers that a run file can hold and no run can use."""

import msgspec
import pytest

from forgemq_contracts.run_rules import check
from tests.unit.contracts.test_run import SOUND


def test_the_largest_seed_is_taken_and_one_more_is_refused():
    """A trainer seeds its generator with 64 bits, and fails with an integer that has more."""
    check(msgspec.structs.replace(SOUND, seed=2**64 - 1))
    with pytest.raises(ValueError, match=rf"^seed: must be at most 2\^64 - 1, got {2**64}$"):
        check(msgspec.structs.replace(SOUND, seed=2**64))


def test_a_large_integer_is_refused_by_its_path_wherever_it_stands():
    queue = msgspec.structs.replace(SOUND.queues[0], staleness_max=2**70)
    rule = rf"^queues\.0\.staleness_max: must be at most 2\^64 - 1, got {2**70}$"
    with pytest.raises(ValueError, match=rule):
        check(msgspec.structs.replace(SOUND, queues=(queue,)))
