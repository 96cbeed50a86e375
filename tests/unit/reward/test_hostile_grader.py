"""A reward function that looks for the broker's password, in its process and in its parent."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile_program import NOTHING, SECRETS

ROOT = Path(__file__).parents[3]
CODE = """
import json, os
from tests.hostile_program import look

def outcome(episode):
    raise RuntimeError(json.dumps(look(os.getppid())))
"""
# The part of the reward service that runs the user's code, hidden as the service is.
SERVICE = """
import asyncio, os, sys
from forgemq_reward.grader_messages import Load, QueueFunctions
from forgemq_reward.grader_process import GraderProcess
from forgemq_settings.hidden_process import hide_process
from forgemq_contracts.grading import GradingEpisode

EPISODE = GradingEpisode(
    episode_id="g-1.0.0", domain="d", task={}, result=None, completions=(), rewards=(),
    engine_s=0.0, tool_s=0.0, virtual_s=None, duration_s=0.0,
)

async def main():
    functions = QueueFunctions(domain="d", outcome="hostile:outcome", process="", speed="")
    load = Load(code_paths=tuple(sys.argv[1:]), queues=(functions,))
    process = GraderProcess(load, timeout_s=30, environ=os.environ)
    try:
        print((await process.grade(EPISODE)).error)
    finally:
        await process.close()

hide_process()
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="hides on Linux only")
def test_a_grader_finds_no_password_of_broker_or_blobs(tmp_path: Path) -> None:
    (tmp_path / "hostile.py").write_text(CODE)
    command = [sys.executable, "-c", SERVICE, str(tmp_path), str(ROOT)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/unprivileged.py"), *command],
        env={**os.environ, **SECRETS},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.strip()
    assert json.loads(said.removeprefix("outcome raised RuntimeError: ")) == NOTHING
