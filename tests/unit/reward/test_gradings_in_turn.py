"""Gradings that wait for each other in one process: a real one, and real time limits."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from forgemq_reward.core.verdict import Verdict
from forgemq_reward.grader_messages import Load, QueueFunctions
from forgemq_reward.grader_process import GraderProcess
from tests.unit.reward.test_grader_process import episode

pytestmark = pytest.mark.slow

TIMEOUT_S = 2.0
CODE = """
import asyncio
from forgemq_graders.turns import in_turn

place = asyncio.Semaphore(1)

async def outcome(episode):
    async with in_turn(place):
        await asyncio.sleep(episode.task["say"])
    return 1.0
"""


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[GraderProcess]:
    (tmp_path / "rewards_in_turn.py").write_text(CODE)
    functions = QueueFunctions(domain="d", outcome="rewards_in_turn:outcome", process="", speed="")
    process = GraderProcess(
        Load(code_paths=(str(tmp_path),), queues=(functions,)),
        timeout_s=TIMEOUT_S,
        environ=os.environ,
    )
    await process.start()
    yield process
    await process.close()


async def test_a_wait_that_is_longer_than_the_limit_masks_nobody(process):
    """The last of seven waits for 3.6 s, and works for 0.6 s."""
    graded = await asyncio.gather(*(process.grade(episode(0.6)) for _ in range(7)))
    assert graded == [Verdict(outcome=1.0)] * 7


async def test_what_works_for_too_long_is_ended_and_those_behind_it_are_graded(process):
    hung, *behind = await asyncio.gather(
        process.grade(episode(600)), *(process.grade(episode(0)) for _ in range(3))
    )
    assert hung == Verdict(error=f"the graders took more than {TIMEOUT_S:g} s")
    assert behind == [Verdict(outcome=1.0)] * 3
