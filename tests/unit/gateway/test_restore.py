"""A restart reads what open episodes need, and passes over the rest undecoded."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forgemq_bus.log import Emit, Place
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_telemetry.telemetry import Telemetry
from tests.unit.gateway.scripted_lane import GROUP_PARTITIONS, wall_ms
from tests.unit.gateway.world import World, configuration_of, running

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
UNREADABLE = b"\xc1"


def log_store() -> Callable[[], MemoryLog]:
    return MemoryLog(run="r", clock_ms=wall_ms).open


async def asked(world: World, claim: Any, *, turns: int = 1) -> Any:
    """The agent's answer after so many turns."""
    here = {**claim, "base_url": f"{world.base_url}/v1"}
    messages = HELLO + [{"role": "assistant", "content": "yes"}, *HELLO] * (turns - 1)
    return await world.client(here).chat.completions.create(model="policy", messages=messages)


async def ended(world: World, claim: Any) -> int:
    path = f"/v1/episodes/{claim['episode_id']}/finish"
    return (await world.admin("POST", path, {})).status_code


async def write_unreadable(world: World, group: str) -> None:
    """A record about a completion of this group that no reader can decode."""
    topic, headers = topics.DELIVERED_COMPLETIONS.name, (("group", group.encode()),)
    writer = await world.log.writer()
    await writer.write(Emit(topic=topic, partition=0, key=b"k", value=UNREADABLE, headers=headers))
    await writer.close()


async def test_only_completions_of_open_episodes_are_restored(model: Path) -> None:
    """One group retires; of the other, one episode has ended and one is in its second turn."""
    lines, opener = io.StringIO(), log_store()
    telemetry = Telemetry(service="gateway", stream=lines)
    dead = Place(topics.DELIVERED_COMPLETIONS.dlq_name, 0)
    await opener().create_topics({dead.topic: GROUP_PARTITIONS})
    async with running(opener, configuration_of(model), lambda _: "yes", telemetry=telemetry) as (
        world,
        _,
    ):
        over, group = await world.open_group("k1"), await world.open_group("k2")
        claims = [await world.claim(each) for each in (over, group, group)]
        for claim in claims:
            await asked(world, claim)
        assert await ended(world, claims[1]) == 200
        await world.retire(over)
        await write_unreadable(world, over)
        await world.eventually(topics.RETIRED_GROUPS, 1)
        await world.stop()
        await world.start_another()
        second = await asked(world, claims[2], turns=2)
        statuses = [await ended(world, claim) for claim in claims]
        letters = await world.log.end_positions([dead])
        finals = await world.records(topics.FINISHED_EPISODES)
    events = [json.loads(line) for line in lines.getvalue().splitlines()]
    event = [each for each in events if each["event"] == "restored"][-1]
    assert (event["groups"], event["completions"]) == (1, 1)
    assert second.choices[0].message.content == "yes"
    assert statuses == [410, 200, 200]
    assert sorted(len(final.manifest) for final in finals) == [1, 2]
    assert letters == {dead: 0}
