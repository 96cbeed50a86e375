"""Which values of a reward the gateway takes."""

from pathlib import Path

import pytest

from forgemq_bus.memory import MemoryLog
from tests.unit.gateway.scripted_lane import wall_ms
from tests.unit.gateway.world import configuration_of, running


@pytest.mark.parametrize(("value", "sign"), [(1e308, "<="), (1.1e12, "<="), (-1e39, ">=")])
async def test_a_reward_out_of_bounds_is_refused(model: Path, value: float, sign: str) -> None:
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configuration_of(model), lambda _: "yes") as (world, _):
        claim = await world.episode()
        path = f"/v1/episodes/{claim['episode_id']}/rewards"
        answer = await world.admin("POST", path, {"reward_id": "r", "name": "n", "value": value})
        largest = await world.admin("POST", path, {"reward_id": "s", "name": "n", "value": 1e12})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "value"
    assert f"{sign} {'-' * (value < 0)}1000000000000.0" in error["message"]
    assert largest.status_code == 200
