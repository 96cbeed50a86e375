"""The same inputs give the same bytes: in every process, and with a restart at any snapshot."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.replay.digests import case_digest
from tests.simulation.cases import CASES

ROOT = Path(__file__).parents[2]


def digests_of_a_process(hash_seed: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.replay.digests"],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_output_bytes_do_not_depend_on_the_hash_seed():
    first, *others = [digests_of_a_process(seed) for seed in ("0", "1", "2")]
    assert [line.split()[0] for line in first.splitlines()] == [make.__name__ for make in CASES]
    assert others == [first, first]


@pytest.mark.parametrize("make_case", CASES, ids=lambda make: make.__name__)
def test_a_core_restored_from_its_snapshot_goes_on_with_the_same_bytes(make_case):
    assert case_digest(make_case(), is_restored=True) == case_digest(make_case())


@pytest.mark.parametrize("make_case", CASES, ids=lambda make: make.__name__)
def test_a_snapshot_is_the_same_after_a_restore(make_case):
    case = make_case()
    core, again = case.make_core(), case.make_core()
    assert core.snapshot() == again.snapshot()
    again.restore(core.snapshot())
    assert again.snapshot() == core.snapshot()
