"""The worked example of services/agents/README.md, run as it stands against the real gateway."""

import asyncio
import re
import shutil
from pathlib import Path

import pytest

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from tests.unit.gateway.scripted_lane import wall_ms
from tests.unit.gateway.world import ADMIN_KEY, configuration_of, running

README = Path(__file__).parents[3] / "services" / "agents" / "README.md"


@pytest.mark.skipif(not shutil.which("curl") or not shutil.which("jq"), reason="needs curl and jq")
async def test_the_example_plays_an_episode_to_its_end(model: Path):
    (script,) = re.findall(r"```sh\n(.*?)```", README.read_text(), re.DOTALL)
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configuration_of(model), lambda _: "hi there") as (world, _):
        shell = await asyncio.create_subprocess_exec(
            "bash",
            "-eu",
            "-c",
            script,
            env={"PATH": "/usr/bin:/bin", "GATEWAY": world.base_url, "ADMIN_KEY": ADMIN_KEY},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        (requested,) = await world.eventually(topics.REQUESTED_GROUPS, 1)
        await world.admit(requested.group_id)
        output, _ = await asyncio.wait_for(shell.communicate(), timeout=30)
        assert shell.returncode == 0, output.decode()
        (ended,) = await world.records(topics.FINISHED_EPISODES)
    assert (ended.status, ended.result) == ("completed", b'{"answer": "hello"}')
    assert [(reward.name, reward.value) for reward in ended.rewards] == [("passed", 1.0)]
    assert len(ended.manifest) == 1
    assert '"state":"admitted"' in output.decode()
    assert "hi there" in output.decode()
