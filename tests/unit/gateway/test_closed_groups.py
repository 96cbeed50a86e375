"""A group past its deadline keeps what is finished of it."""

import asyncio
from pathlib import Path

import pytest

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.groups import ClosedGroup
from forgemq_gateway.ticks import TICK_S
from tests.unit.gateway.scripted_lane import wall_ms
from tests.unit.gateway.world import configuration_of, running


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_closed_group_keeps_what_is_finished_and_ends_the_rest_as_failed(
    model: Path, is_restarted: bool
) -> None:
    """Of three episodes one is finished, one is held by an agent, and one nobody has claimed."""
    store = MemoryLog(run="r", clock_ms=wall_ms)
    async with running(store.open, configuration_of(model), lambda _: "yes") as (world, _):
        body = {"domain": "shop", "idempotency_key": "k", "task": 1, "group_size": 3}
        group = (await world.admin("POST", "/v1/groups", body)).json()["group_id"]
        await world.admit(group)
        done, held = await world.claim(group), await world.claim(group)
        answer = await world.admin("POST", f"/v1/episodes/{done['episode_id']}/finish", {})
        assert answer.status_code == 200
        if is_restarted:
            await world.kill()
        closed = ClosedGroup(group_id=group, domain="shop", purpose="train", detail="too late")
        await world.write(topics.CLOSED_GROUPS, 0, closed)
        if is_restarted:
            await world.start_another()
        ends = await world.eventually(topics.FINISHED_EPISODES, 3)
        heartbeat = await world.admin("POST", f"/v1/episodes/{held['episode_id']}/heartbeat")
        again = await world.admin("POST", f"/v1/groups/{group}/claim", {"wait_s": 0})
        await asyncio.sleep(2 * TICK_S)
        assert len(await world.records(topics.FINISHED_EPISODES)) == 3, "each ends once"
    found = {end.index: (end.episode_id, end.status, end.detail) for end in ends}
    assert found == {
        0: (done["episode_id"], "completed", ""),
        1: (held["episode_id"], "failed", "too late"),
        2: (f"{group}.2.0", "failed", "too late"),
    }
    assert (heartbeat.status_code, again.status_code) == (409, 410)
