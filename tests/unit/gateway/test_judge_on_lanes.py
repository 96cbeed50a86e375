"""A judge that asks the lanes of the run itself, by the gateway, with a key of live traffic."""

import asyncio
from pathlib import Path

import pytest

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_graders import Judge, JudgeError, judged
from tests.unit.gateway.scripted_lane import Asked, wall_ms
from tests.unit.gateway.test_live import KEY, Caller, configured
from tests.unit.gateway.world import running
from tests.unit.graders.episodes import answered


async def test_a_judge_asks_the_runs_own_lanes_once_for_equal_questions(model: Path) -> None:
    asked: list[str] = []

    def script(each: Asked) -> str:
        asked.append(each.text)
        return "A good one. Score: 7"

    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configured(model), script) as (world, _):
        admitting = asyncio.create_task(Caller(world).keep_admitting())
        judge = Judge(url=f"{world.base_url}/v1", model="policy", api_key=KEY, timeout_s=20.0)
        outcome = judged(judge, prompt="Judge this: {answer}", scale=10.0)
        scores = [await outcome(answered("4")) for _ in range(3)]
        wrong = Judge(url=judge.url, model="policy", api_key="no-key", tries_max=1)
        with pytest.raises(JudgeError, match="status 401"):
            await judged(wrong, prompt="{answer}")(answered("4"))
        groups = await world.records(topics.REQUESTED_GROUPS)
        admitting.cancel()
    assert scores == [0.7] * 3
    assert len(asked) == 1
    assert "Judge this: 4" in asked[0]
    assert [(group.source, group.purpose) for group in groups] == [("live", "eval")]
