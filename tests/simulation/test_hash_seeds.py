"""Outputs and snapshots of the scheduler's and reward's cores are the same under any hash seed."""

import hashlib
import os
import subprocess
import sys

import pytest

from forgemq_contracts import topics
from forgemq_contracts.messages import Message
from tests.simulation.harness import CoreCase
from tests.simulation.scheduling_cases import TORN, reward, scheduler

CASES = {"reward": reward, "scheduler": scheduler}


def digest(case: CoreCase) -> str:
    """blake2b over every output and the snapshot after every record."""
    core, state = case.make_core(), hashlib.blake2b(digest_size=16)
    for offset, emit in enumerate(case.script):
        if emit.value == TORN:
            continue
        record = topics.decode(topics.BY_NAME[emit.topic], emit.value)
        message = Message(
            topic=emit.topic, partition=0, offset=offset, timestamp_ms=0, record=record
        )
        for output in core.handle(message):
            state.update(topics.encode(output.record))
        state.update(core.snapshot())
    return state.hexdigest()


@pytest.mark.simulation
@pytest.mark.parametrize("name", CASES)
def test_the_hash_seed_decides_nothing(name):
    code = (
        "from tests.simulation.test_hash_seeds import CASES, digest; "
        f"print(digest(CASES[{name!r}]()))"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert digests == {digest(CASES[name]()) + "\n"}
