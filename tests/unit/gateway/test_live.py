"""Callers of live keys: no episode is claimed, and each conversation is recorded as one."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from forgemq_bus.errors import LogUnavailableError
from forgemq_bus.log import Emit
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.groups import ClosedGroup
from forgemq_contracts.live_key import LiveKey
from forgemq_contracts.partitions import group_partition
from forgemq_contracts.run import RunConfiguration
from forgemq_gateway.core.live import SESSION_HEADER, LiveCaller
from tests.unit.gateway.hindered_log import HinderedLog, LateLog
from tests.unit.gateway.scripted_lane import GROUP_PARTITIONS, Asked, Script, wall_ms
from tests.unit.gateway.test_replicas import owners, settled
from tests.unit.gateway.world import World, configuration_of, plain_http, running

KEY = "a-key-of-an-application"
CHAT = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
LIVE = LiveKey(
    name="helpdesk", domain="shop", key_sha256=sha256(KEY.encode()).hexdigest(), idle_s=600.0
)


def configured(model: Path, live: LiveKey = LIVE) -> RunConfiguration:
    return msgspec.structs.replace(configuration_of(model), live=(live,))


class Caller:
    """An application with a live key, and the scheduler that admits its groups."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.admitted: set[str] = set()

    async def keep_admitting(self) -> None:
        while True:
            for group in await self.world.records(topics.REQUESTED_GROUPS):
                if group.group_id not in self.admitted:
                    self.admitted.add(group.group_id)
                    await self.world.admit(group.group_id)
            await asyncio.sleep(0.02)

    async def post(
        self,
        messages: list[Any],
        *,
        key: str = KEY,
        path: str = "/v1/chat/completions",
        **more: Any,
    ) -> httpx.Response:
        headers = more.pop("headers", {})
        async with plain_http() as client:
            return await client.post(
                f"{self.world.base_url}{path}",
                json={"model": "m", "messages": messages},
                headers={"authorization": f"Bearer {key}", **(headers or {})},
            )

    async def say(self, messages: list[Any], **more: Any) -> tuple[str, list[Any]]:
        """The episode that answers, and the messages with the answer."""
        answer = await self.post(messages, **more)
        assert answer.status_code == 200, answer.text
        reply = answer.json()["choices"][0]["message"]
        said = {"role": "assistant", "content": reply["content"]}
        return answer.headers["x-forgemq-episode"], [*messages, said]

    async def restart(self) -> None:
        await self.world.restart()


@asynccontextmanager
async def live(
    model: Path,
    script: Script = lambda _: "yes",
    policy: LiveKey = LIVE,
    open_log: Callable[[], Any] | None = None,
) -> AsyncIterator[Caller]:
    log = open_log or MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configured(model, policy), script) as (world, _):
        caller = Caller(world)
        admitting = asyncio.create_task(caller.keep_admitting())
        try:
            yield caller
        finally:
            admitting.cancel()


def counted() -> Script:
    """Answers that differ."""
    numbers = itertools.count()
    return lambda _: f"number {next(numbers)}"


def user(text: str) -> Any:
    return {"role": "user", "content": text}


async def test_a_conversation_is_one_episode_marked_and_no_other_key_is_let_in(model: Path) -> None:
    async with live(model) as caller:
        first, said = await caller.say(HELLO)
        second, _ = await caller.say([*said, user("and now?")])
        wrong = await caller.post(HELLO, key=KEY + "x")
        models = await caller.world.client(
            {"key": KEY, "base_url": f"{caller.world.base_url}/v1"}
        ).models.list()
        [group] = await caller.world.records(topics.REQUESTED_GROUPS)
        [opened] = await caller.world.records(topics.OPENED_EPISODES)
    assert first == second == opened.episode_id
    assert (group.source, group.purpose, group.group_size) == ("live", "eval", 1)
    assert (group.task, group.idempotency_key[:14]) == (b'{"live":"helpdesk"}', "live/helpdesk/")
    assert opened.lease_s == 600.0
    assert wrong.status_code == 401
    assert [each.id for each in models.data] == ["policy"]


async def test_other_messages_are_another_episode_and_its_groups_count_up(model: Path) -> None:
    async with live(model, counted()) as caller:
        talks = [await caller.say([user(f"hello {number}")]) for number in range(4)]
        again = [await caller.say([*said, user("more")]) for _, said in reversed(talks)]
        groups = await caller.world.records(topics.REQUESTED_GROUPS)
    assert [episode for episode, _ in again] == [episode for episode, _ in reversed(talks)]
    assert len({episode for episode, _ in talks}) == 4
    keys = [group.idempotency_key.rpartition("/") for group in groups]
    assert [number for _, _, number in keys] == ["0", "1", "2", "3"]
    assert len({source for source, _, _ in keys}) == 1


async def test_the_same_first_message_of_two_callers_is_two_conversations(model: Path) -> None:
    async with live(model) as caller:
        both = await asyncio.gather(caller.say(HELLO), caller.say(HELLO))
        third, _ = await caller.say(HELLO)
    assert len({*(episode for episode, _ in both), third}) == 3


async def test_conversations_that_begin_at_once_are_one_episode_each(model: Path) -> None:
    """Each group is read back from the log before its write returns."""

    async def answer_late(emit: Emit) -> None:
        if emit.topic == topics.REQUESTED_GROUPS.name:
            await asyncio.sleep(0.3)

    store = MemoryLog(run="r", clock_ms=wall_ms)
    async with live(model, open_log=lambda: LateLog(store.open(), answer_late)) as caller:
        first = asyncio.create_task(caller.say(HELLO))
        await caller.world.eventually(topics.ADMITTED_GROUPS, 1)
        talks = [await caller.say(HELLO), await first]
        opened = await caller.world.records(topics.OPENED_EPISODES)
    assert len({episode for episode, _ in talks}) == len(opened) == 2


async def test_a_conversation_that_the_log_does_not_take_is_503_and_the_next_one_begins(
    model: Path,
) -> None:
    refused = [topics.REQUESTED_GROUPS.name, topics.OPENED_EPISODES.name]

    async def refuse(emit: Emit) -> None:
        if emit.topic in refused:
            refused.remove(emit.topic)
            raise LogUnavailableError("no answer in time")

    store = MemoryLog(run="r", clock_ms=wall_ms)
    async with live(model, open_log=lambda: HinderedLog(store.open(), refuse)) as caller:
        answers = [await caller.post(HELLO) for _ in range(2)]
        episode, _ = await caller.say(HELLO)
        opened = await caller.world.records(topics.OPENED_EPISODES)
    assert [each.status_code for each in answers] == [503, 503]
    assert [each.headers["retry-after"] for each in answers] == ["5", "5"]
    assert [each.episode_id for each in opened] == [episode]


async def test_a_retry_of_a_first_request_is_answered_from_the_record(model: Path) -> None:
    async with live(model, counted()) as caller:
        headers = {"x-stainless-retry-count": "1"}
        first = await caller.say(HELLO)
        again = await caller.say(HELLO, headers=headers)
        keyed = [await caller.say(HELLO, headers={"idempotency-key": "a"}) for _ in range(2)]
    assert first == again
    assert keyed[0] == keyed[1] != first


async def test_a_session_is_one_episode_whatever_its_messages(model: Path) -> None:
    async with live(model) as caller:
        talks = await asyncio.gather(
            *(caller.say([user(str(n))], headers={SESSION_HEADER: "s1"}) for n in range(3)),
            caller.say(HELLO, headers={SESSION_HEADER: "s2"}),
        )
        opened = await caller.world.records(topics.OPENED_EPISODES)
        bad = await caller.post(HELLO, headers={SESSION_HEADER: "s" * 201})
    assert len({episode for episode, _ in talks[:3]}) == 1
    assert talks[3][0] != talks[0][0]
    assert sorted(record.session for record in opened) == ["s1", "s2"]
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, SESSION_HEADER)


@pytest.mark.slow
@pytest.mark.wall_clock
async def test_an_episode_ends_when_it_is_idle_also_after_a_restart(model: Path) -> None:
    policy = msgspec.structs.replace(LIVE, idle_s=0.5)
    async with live(model, policy=policy) as caller:
        episode, said = await caller.say(HELLO, headers={SESSION_HEADER: "s1"})
        await caller.restart()
        [end] = await caller.world.eventually(topics.FINISHED_EPISODES, 1)
        later, _ = await caller.say(said, headers={SESSION_HEADER: "s1"})
    assert episode != later
    assert (end.episode_id, end.status, end.source) == (episode, "completed", "live")
    assert (len(end.manifest), end.result) == (1, b'{"session":"s1"}')
    assert end.duration_s >= 0.5


async def test_a_conversation_goes_on_after_the_gateway_was_killed_in_its_first_turn(
    model: Path,
) -> None:
    async def slow(_: Asked) -> str:
        await asyncio.sleep(2)
        return "late"

    async with live(model, slow) as caller:
        asking = asyncio.create_task(caller.post(HELLO))
        await caller.world.eventually(topics.REQUESTED_COMPLETIONS, 1)
        await caller.restart()
        await asyncio.gather(asking, return_exceptions=True)  # Its connection is lost.
        episode, said = await caller.say(HELLO)
        [opened] = await caller.world.records(topics.OPENED_EPISODES)
        asked = await caller.world.records(topics.REQUESTED_COMPLETIONS)
    assert (episode, said[-1]["content"]) == (opened.episode_id, "late")
    assert len({record.request_id for record in asked}) == 1


async def test_a_conversation_past_its_deadline_ends_completed_and_another_begins(
    model: Path,
) -> None:
    async with live(model) as caller:
        episode, said = await caller.say(HELLO)
        group_id = episode.split(".")[0]
        closed = ClosedGroup(group_id=group_id, domain="shop", purpose="eval", detail="late")
        number = group_partition(group_id, partitions=GROUP_PARTITIONS)
        await caller.world.write(topics.CLOSED_GROUPS, number, closed)
        [end] = await caller.world.eventually(topics.FINISHED_EPISODES, 1)
        later, _ = await caller.say([*said, user("more")])
    assert (end.episode_id, end.status, len(end.manifest)) == (episode, "completed", 1)
    assert later != episode


async def test_a_group_whose_request_was_given_up_is_the_next_conversation(model: Path) -> None:
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configured(model), lambda _: "yes") as (world, _):
        caller = Caller(world)
        refused = await caller.post(HELLO)
        admitting = asyncio.create_task(caller.keep_admitting())
        await caller.say(HELLO)
        admitting.cancel()
        groups = await world.records(topics.REQUESTED_GROUPS)
    assert (refused.status_code, "no engine serves" in refused.text) == (503, True)
    assert len(groups) == 1


@pytest.mark.slow
@pytest.mark.wall_clock
async def test_an_episode_that_was_never_answered_ends_aborted(model: Path) -> None:
    policy = msgspec.structs.replace(LIVE, idle_s=0.2)
    async with live(model, policy=policy) as caller:
        too_long = await caller.post([user("word " * 9000)])
        [end] = await caller.world.eventually(topics.FINISHED_EPISODES, 1)
    assert too_long.status_code == 400
    assert (end.status, end.detail) == ("aborted", "no request was answered")


async def test_a_response_goes_on_by_its_id_and_a_reward_reaches_its_episode(model: Path) -> None:
    async with live(model) as caller:
        await caller.say(HELLO)
        client = caller.world.client({"key": KEY, "base_url": f"{caller.world.base_url}/v1"})
        first = await client.responses.with_raw_response.create(model="m", input="hi")
        after = await client.responses.with_raw_response.create(
            model="m", input="more", previous_response_id=first.parse().id
        )
        episode = first.headers["x-forgemq-episode"]
        path = f"/v1/episodes/{episode}/rewards"
        body = {"reward_id": "1", "name": "outcome", "value": 1.0}
        rewarded = await caller.world.admin("POST", path, body)
        with pytest.raises(openai.NotFoundError, match="previous_response_id"):
            await client.responses.create(model="m", input="x", previous_response_id="resp_no")
    assert after.headers["x-forgemq-episode"] == episode
    assert rewarded.status_code == 200


@asynccontextmanager
async def two_gateways(model: Path, script: Script) -> AsyncIterator[Caller]:
    async with live(model, script) as caller:
        world = caller.world
        await world.start_another()
        await settled(world)
        yield caller


async def asked_of(caller: Caller, index: int, messages: list[Any], **more: Any) -> Any:
    """As `say`, over the gateway with this index."""
    caller.world.base_url = caller.world.gateways[index].url
    return await caller.say(messages, **more)


@pytest.mark.slow
async def test_any_gateway_answers_and_a_conversation_is_one_episode(model: Path) -> None:
    async with two_gateways(model, counted()) as caller:
        sessions = [f"s{number}" for number in range(8)]
        named = [
            [await asked_of(caller, at, HELLO, headers={SESSION_HEADER: name}) for at in (0, 1)]
            for name in sessions
        ]
        first, said = await asked_of(caller, 0, HELLO)
        second, _ = await asked_of(caller, 1, [*said, user("more")])
        groups = await caller.world.records(topics.REQUESTED_GROUPS)
        numbers = {group_partition(g.group_id, partitions=GROUP_PARTITIONS) for g in groups}
        shares = await owners(caller.world)
        urls = {each.url for each in caller.world.gateways}
    assert all(one[0] == other[0] for one, other in named)
    assert len({one[0] for one, _ in named}) == len(sessions)
    assert first == second
    assert {shares[number] for number in numbers} == urls
    assert len({group.idempotency_key for group in groups}) == len(groups) == 9


@pytest.mark.slow
async def test_a_turn_goes_on_at_the_next_owner_with_no_word_of_a_retry(model: Path) -> None:
    async def slow(_: Asked) -> str:
        await asyncio.sleep(1.5)
        return "late"

    async with two_gateways(model, slow) as caller:
        first = await caller.world.records(topics.OWNED_RUNS)
        home = LiveCaller(policy=LIVE).home
        number = group_partition(home, partitions=GROUP_PARTITIONS)
        owner = next(each.url for each in first[-1].owners if number in each.partitions)
        other = next(at for at, each in enumerate(caller.world.gateways) if each.url != owner)
        asking = asyncio.create_task(asked_of(caller, other, HELLO))
        await caller.world.eventually(topics.REQUESTED_COMPLETIONS, 1)
        leaving = next(each for each in caller.world.gateways if each.url == owner)
        leaving.stop.set()
        episode, said = await asking
        opened = await caller.world.records(topics.OPENED_EPISODES)
        asked = await caller.world.records(topics.REQUESTED_COMPLETIONS)
    assert ([each.episode_id for each in opened], said[-1]["content"]) == ([episode], "late")
    assert len({record.request_id for record in asked}) == 1


@pytest.mark.parametrize("stream", ["recorded", "live"])
async def test_a_streamed_answer_names_its_episode_too(model: Path, stream: str) -> None:
    configuration = configured(model)
    queue = msgspec.structs.replace(configuration.queues[0], stream=stream)
    configuration = msgspec.structs.replace(configuration, queues=(queue,))
    store = MemoryLog(run="r", clock_ms=wall_ms)
    async with running(store.open, configuration, lambda _: "yes") as (world, _):
        caller = Caller(world)
        admitting = asyncio.create_task(caller.keep_admitting())
        client = world.client({"key": KEY, "base_url": f"{world.base_url}/v1"})
        raw = await client.chat.completions.with_raw_response.create(
            model="m", messages=HELLO, stream=True
        )
        chunks = [chunk.choices[0].delta.content or "" async for chunk in raw.parse()]
        admitting.cancel()
        [opened] = await world.records(topics.OPENED_EPISODES)
    assert ("".join(chunks), raw.headers["x-forgemq-episode"]) == ("yes", opened.episode_id)


async def test_tokens_are_not_counted_for_a_live_key(model: Path) -> None:
    async with live(model) as caller:
        answer = await caller.post(HELLO, path="/v1/messages/count_tokens")
        opened = await caller.world.records(topics.OPENED_EPISODES)
    assert (answer.status_code, opened) == (404, [])
