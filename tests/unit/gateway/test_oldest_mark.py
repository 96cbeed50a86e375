"""A restarted gateway begins to read at or before the first record of every open group."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from forgemq_bus.log import Place
from forgemq_contracts import topics
from forgemq_gateway.oldest_mark import OldestMark
from tests.unit.gateway.test_episodes import HELLO, log_store, yes
from tests.unit.gateway.test_hostile_content import asked
from tests.unit.gateway.world import World, configuration_of, partitions_of, running

FINISHED = Place("finished", 0)
YES = {"role": "assistant", "content": "yes"}


def test_a_restart_needs_the_mark_before_the_oldest_open_group_and_no_older_one() -> None:
    oldest = OldestMark({FINISHED: 0})
    assert oldest.accept({FINISHED: 10}, open_groups=["a"]) == {FINISHED: 0}
    assert oldest.accept({FINISHED: 20}, open_groups=["a", "b"]) == {FINISHED: 0}
    assert oldest.accept({FINISHED: 30}, open_groups=["b"]) == {FINISHED: 10}
    assert oldest.accept({FINISHED: 40}, open_groups=[]) == {FINISHED: 40}


# A step is (kind, group): a group becomes known, writes a record or retires; or a mark is taken.
STEPS = st.lists(
    st.tuples(st.sampled_from(["enter", "write", "write", "end", "mark"]), st.integers(0, 4)),
    max_size=60,
)


@given(STEPS)
def test_no_record_of_an_open_group_lies_below_the_oldest_mark(
    steps: list[tuple[str, int]],
) -> None:
    oldest = OldestMark({FINISHED: 0})
    written: dict[str, list[int]] = {}
    end = 0
    for kind, number in steps:
        group = f"g-{number}"
        if kind == "enter" and group not in written:
            written[group] = []
        elif kind == "write" and group in written:
            written[group].append(end)
            end += 1
        elif kind == "end":
            written.pop(group, None)
        elif kind == "mark":
            position = oldest.accept({FINISHED: end}, open_groups=list(written))[FINISHED]
            assert all(position <= offset for own in written.values() for offset in own)
            assert position <= end


async def needed_by_gateway(world: World) -> dict[Place, int]:
    counts = partitions_of(world.configuration)
    places = [
        Place(topic.name, number)
        for topic in topics.OF_RUN
        if topics.needed_group("gateway") in topic.needed_by
        for number in range(counts[topic.name])
    ]
    return await world.log.committed(group=topics.needed_group("gateway"), places=places)


async def needed_completions(world: World) -> list[int]:
    name = topics.FINISHED_COMPLETIONS.name
    return [at for place, at in (await needed_by_gateway(world)).items() if place.topic == name]


async def say(world: World, claim: Any, text: str, *before: dict[str, str]) -> None:
    here = {**claim, "base_url": f"{world.base_url}/v1"}
    messages = [*HELLO, *before, {"role": "user", "content": text}]
    answer = await asked(here, json.dumps({"messages": messages}).encode())
    assert answer.status_code == 200, answer.text


async def test_a_gateway_restarts_where_its_open_groups_begin_and_forgets_none_of_them(
    model: Path,
) -> None:
    """What the restart does not need is deleted first, so the restart cannot have read it."""
    async with running(log_store(), configuration_of(model), yes) as (world, lanes):
        world.settings = msgspec.structs.replace(world.settings, mark_every_s=0.05)
        await world.restart()
        over = await world.claim(await world.open_group("k1"))
        await say(world, over, "a")
        await world.admin("POST", f"/v1/episodes/{over['episode_id']}/finish", {})
        await world.retire(over["group_id"])
        for _ in range(400):
            if any(await needed_completions(world)):
                break
            await asyncio.sleep(0.05)
        claim = await world.claim(await world.open_group("k2"))
        await say(world, claim, "b")
        await asyncio.sleep(0.3)  # More marks are taken, and must not pass the open group.
        await world.log.trim(await needed_by_gateway(world))
        await world.restart()
        await say(world, claim, "d", {"role": "user", "content": "b"}, YES)
        gone = (await world.admin("GET", f"/v1/groups/{over['group_id']}")).json()
        again = await world.admin(
            "POST", "/v1/groups", {"domain": "shop", "idempotency_key": "k1", "task": {"n": 1}}
        )
        kept = [
            await world.log.first_positions([place])
            for place in await needed_by_gateway(world)
            if place.topic == topics.FINISHED_COMPLETIONS.name
        ]
        requested = lanes[0].seen[-1].record
    assert sum(at for first in kept for at in first.values()) == 1
    assert (requested.is_delta, requested.turn.is_fork, requested.turn.sequence) == (True, False, 1)
    assert (gone["state"], gone["retire_reason"]) == ("retired", "zero_variance")
    assert again.json()["state"] == "retired"


async def test_a_gateway_whose_writer_was_taken_over_by_one_that_died_goes_on_committing(
    model: Path,
) -> None:
    async with running(log_store(), configuration_of(model), yes) as (world, _):
        world.settings = msgspec.structs.replace(world.settings, mark_every_s=0.02)
        await world.restart()
        await asyncio.sleep(0.2)
        newer = await world.log.transaction_writer(topics.needed_group("gateway"))
        await newer.close()
        over = await world.claim(await world.open_group("k1"))
        await say(world, over, "a")
        await world.admin("POST", f"/v1/episodes/{over['episode_id']}/finish", {})
        await world.retire(over["group_id"])
        for _ in range(200):
            if any(await needed_completions(world)):
                break
            await asyncio.sleep(0.05)
        needed = await needed_completions(world)
    assert sum(needed) == 1
