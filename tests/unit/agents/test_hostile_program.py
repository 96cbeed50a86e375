"""A program that plays an episode and looks for what it may not know, under the real process."""

import asyncio
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from tests.hostile_program import NOTHING, SECRETS
from tests.memory_gateway import ADMIN_KEY
from tests.unit.agents.test_schedule import configuration

HOSTILE = Path(__file__).parents[2] / "hostile_program.py"
UNPRIVILEGED = HOSTILE.with_name("unprivileged.py")
CODE = f"""
import subprocess, sys
from forgemq_agents.black_box import black_box

def task(seed, domain, k):
    return {{"k": k}}

run_hostile = black_box((sys.executable, {str(HOSTILE)!r}), timeout_s=20)

async def play(episode):
    await run_hostile(episode)
    # A program that is started without an environment of its own inherits this process's.
    careless = subprocess.run([sys.executable, {str(HOSTILE)!r}], capture_output=True, check=True)
    with open("found.json", "w") as file:
        file.write(episode.result["output"].strip() + "\\n" + careless.stdout.decode())
    sys.stdout.write("found\\n")
    sys.stdout.flush()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="hides on Linux only")
async def test_a_program_of_an_agent_finds_no_key_of_gateway_broker_or_blobs(
    memory_gateway, tmp_path
) -> None:
    gateway = await memory_gateway()
    (tmp_path / "own_code.py").write_text(CODE)
    run = configuration("count", code="own_code", code_paths=(str(tmp_path),))
    (tmp_path / "run.json").write_bytes(msgspec.json.encode(run))
    agents = await asyncio.create_subprocess_exec(
        *(sys.executable, str(UNPRIVILEGED), sys.executable, "-m", "forgemq_agents"),
        cwd=tmp_path,
        env={
            **os.environ,
            **SECRETS,
            "FORGEMQ_AGENTS_CONFIGURATION": str(tmp_path / "run.json"),
            "FORGEMQ_AGENTS_GATEWAY_URL": gateway.url,
            "FORGEMQ_AGENTS_ADMIN_KEY": ADMIN_KEY,
        },
        stdout=asyncio.subprocess.PIPE,
    )
    assert agents.stdout is not None
    try:
        async with asyncio.timeout(50):
            assert await agents.stdout.readline() == b"found\n"
    finally:
        with suppress(ProcessLookupError):  # It ended by itself.
            agents.kill()
        await agents.communicate()
    found = [json.loads(line) for line in (tmp_path / "found.json").read_text().splitlines()]
    assert found == [NOTHING, NOTHING]
