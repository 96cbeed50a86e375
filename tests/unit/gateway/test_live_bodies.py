"""Callers of live keys: the replies that their requests name, and bodies that wait."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from tests.unit.gateway.scripted_lane import wall_ms
from tests.unit.gateway.test_live import KEY, Caller, configured, live, user
from tests.unit.gateway.world import running


async def test_a_response_goes_on_in_the_episode_of_the_reply_that_it_names(model: Path) -> None:
    """Two conversations are the same so far; the older one goes on, with other instructions too."""
    async with live(model) as caller:
        client = caller.world.client({"key": KEY, "base_url": f"{caller.world.base_url}/v1"})

        async def ask(**fields: Any) -> tuple[str, str]:
            raw = await client.responses.with_raw_response.create(model="m", **fields)
            return raw.headers["x-forgemq-episode"], raw.parse().id

        first, response = await ask(input="hi", instructions="be kind")
        second, _ = await ask(input="hi", instructions="be kind")
        after, later = await ask(input="more", previous_response_id=response)
        other, _ = await ask(input="on", previous_response_id=later, instructions="be brief")
    assert first != second
    assert (after, other) == (first, first)


async def test_conversations_that_were_the_same_so_far_go_on_in_an_episode_each(
    model: Path,
) -> None:
    """Two callers say hello and get the same answer; then each says something else, three times.

    The answers differ in the reasoning, which the callers do not send back.
    """
    thoughts = itertools.count(1)
    async with live(model, lambda _: f"<think>\n{'hm ' * next(thoughts)}</think>yes") as caller:
        begun = [await caller.say([user("hello")]) for _ in range(2)]
        episodes: list[list[str]] = []
        for (_, said), word in zip(begun, "xy", strict=True):
            first, on = await caller.say([*said, user(word)])
            again, _ = await caller.say([*said, user(word)])
            last, _ = await caller.say([*on, user("end")])
            episodes.append([first, again, last])
        finished = await caller.world.records(topics.FINISHED_COMPLETIONS)
    assert all(len(set(each)) == 1 for each in episodes)
    assert {each[0] for each in episodes} == {episode for episode, _ in begun}
    reasons = [each.turn.fork_reason for each in finished]
    assert reasons == [None, None, *[None, "resampled", None] * 2]


async def test_reasoning_that_comes_back_says_which_conversation_goes_on(model: Path) -> None:
    thoughts = itertools.count(1)
    async with live(model, lambda _: f"<think>\n{'hm ' * next(thoughts)}</think>yes") as caller:
        begun = [await caller.post([user("hello")]) for _ in range(2)]
        gone_on = []
        for answer in begun:
            reply = answer.json()["choices"][0]["message"]
            after = await caller.post([user("hello"), reply, user("more")])
            gone_on.append(after.headers["x-forgemq-episode"])
    assert gone_on == [answer.headers["x-forgemq-episode"] for answer in begun]


async def test_a_body_counts_while_its_conversation_waits_to_begin(model: Path) -> None:
    """No scheduler admits a group: the first body waits, and beside it the second has no room."""
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configured(model), lambda _: "yes", memory_bytes_max=300_000) as (
        world,
        _,
    ):
        caller = Caller(world)
        first = asyncio.create_task(caller.post([user("a" * 200_000)]))
        await world.eventually(topics.REQUESTED_GROUPS, 1)
        answers = [await caller.post([user("a" * 200_000)]), await first]
    assert [answer.status_code for answer in answers] == [503, 503]
    assert ["memory" in answer.text for answer in answers] == [True, False]
