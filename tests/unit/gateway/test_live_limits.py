"""How many conversations callers of a live key have open at once."""

import asyncio
from pathlib import Path

import msgspec

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_gateway.core.live import SESSION_HEADER
from tests.unit.gateway.scripted_lane import wall_ms
from tests.unit.gateway.test_live import LIVE, Caller, configured, live, user
from tests.unit.gateway.world import running


async def test_a_key_has_so_many_conversations_open_and_no_more(model: Path) -> None:
    policy = msgspec.structs.replace(LIVE, episodes_max=2)
    async with live(model, policy=policy) as caller:
        first, said = await caller.say([user("1")])
        await caller.say([user("2")])
        refused = await caller.post([user("3")])
        again, _ = await caller.say([*said, user("4")])
        await caller.world.admin("POST", f"/v1/episodes/{first}/finish", {})
        await caller.world.retire(first.split(".")[0], reason="evaluated")
        third, _ = await caller.say([user("3")])
    assert (refused.status_code, "episodes_max" in refused.text) == (429, True)
    assert first == again != third


async def test_a_request_that_is_refused_leaves_its_episode_to_the_next_conversation(
    model: Path,
) -> None:
    policy = msgspec.structs.replace(LIVE, episodes_max=2)
    async with live(model, policy=policy) as caller:
        for _ in range(3):
            too_long = await caller.post([user("word " * 9000)])
            assert (too_long.status_code, "context" in too_long.text) == (400, True)
        together = await asyncio.gather(*(caller.say([user(text)]) for text in ("one", "two")))
        again = await caller.post([user("three")])
        records = await caller.world.records(topics.OPENED_EPISODES)
    assert (len({episode for episode, _ in together}), again.status_code) == (2, 429)
    assert len({record.episode_id for record in records}) == 2


async def test_requests_of_one_session_are_held_together_while_nobody_admits_its_group(
    model: Path,
) -> None:
    store = MemoryLog(run="r", clock_ms=wall_ms)
    async with running(store.open, configured(model), lambda _: "yes") as (world, _):
        caller, now_s = Caller(world), asyncio.get_running_loop().time
        began_s = now_s()
        headers = {SESSION_HEADER: "one"}
        asking = [caller.post([user("hello")], headers=headers) for _ in range(6)]
        answers = await asyncio.gather(*asking)
        held_s = now_s() - began_s
    assert [answer.status_code for answer in answers] == [503] * 6
    assert world.settings.lane_hold_s <= held_s < 2 * world.settings.lane_hold_s
