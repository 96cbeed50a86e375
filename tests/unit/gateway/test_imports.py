"""Episodes of conversations that were finished elsewhere."""

from pathlib import Path
from typing import Any

import openai
import pytest

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from tests.unit.gateway.scripted_lane import wall_ms
from tests.unit.gateway.world import configuration_of, running

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
IMPORT = {
    "domain": "shop",
    "idempotency_key": "import/1",
    "task": {"b": 1, "a": [2]},
    "purpose": "eval",
    "source": "import",
    "group_size": 1,
}


async def test_an_imported_episode_takes_no_request_and_ends_marked_also_after_a_restart(
    model: Path,
) -> None:
    async with running(
        MemoryLog(run="r", clock_ms=wall_ms).open, configuration_of(model), lambda _: "yes"
    ) as (world, lanes):
        group_id = (await world.admin("POST", "/v1/groups", IMPORT)).json()["group_id"]
        await world.admit(group_id)
        claim = await world.claim(group_id)
        with pytest.raises(openai.ConflictError, match="is imported: it takes no request"):
            await world.client(claim).chat.completions.create(model="policy", messages=HELLO)
        await world.restart()
        finished = await world.admin(
            "POST", f"/v1/episodes/{claim['episode_id']}/finish", {"result": 4}
        )
        [end] = await world.records(topics.FINISHED_EPISODES)
        asked = [lane.seen for lane in lanes]
    assert finished.status_code == 200
    assert (end.source, end.purpose, end.manifest) == ("import", "eval", ())
    assert (end.task, end.result) == (b'{"b":1,"a":[2]}', b"4")
    assert not any(asked)
