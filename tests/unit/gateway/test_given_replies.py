"""Episodes of a supervised domain: the shipped player gives every reply, and lanes read them."""

from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from forgemq_agents import supervised
from forgemq_agents.episode import Episode
from forgemq_agents.gateway_client import GatewayClient
from forgemq_agents.requests import JsonRequests, Retry
from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.admin import Claim
from forgemq_contracts.arrays import unpack_ids
from forgemq_contracts.run import Queue, RunConfiguration
from forgemq_contracts.supervised import Supervised
from forgemq_telemetry.telemetry import Telemetry
from tests.unit.gateway.scripted_lane import Asked, contexts_of, wall_ms
from tests.unit.gateway.world import ADMIN_KEY, World, configuration_of, running

CALL = {
    "id": "call_of_the_file",
    "type": "function",
    "function": {"name": "price", "arguments": '{"item": "pen"}'},
}
TALK: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "a pen?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_of_the_file", "content": "7"},
        {"role": "assistant", "content": "It is 7."},
        {"role": "user", "content": "And two?"},
        {"role": "assistant", "content": "14."},
    ],
    "tools": [{"type": "function", "function": {"name": "price", "parameters": {}}}],
    "reward": 0.5,
    "result": "14",
}
REQUEST = {
    "domain": "talks",
    "idempotency_key": "talks/0",
    "task": TALK,
    "purpose": "train",
    "source": "import",
}


def with_talks(model: Path, **fields: Any) -> RunConfiguration:
    configuration = configuration_of(model, **fields)
    talks = Queue(
        domain="talks",
        task_source="",
        agent="",
        group_size=1,
        groups_per_step=1,
        slots=4,
        supervised=Supervised(fraction=0.5),
    )
    return msgspec.structs.replace(configuration, queues=(*configuration.queues, talks))


def reading(world_of: list[World]) -> Any:
    def script(asked: Asked) -> str:
        given = unpack_ids(asked.record.given)
        return world_of[0].rendering.decode(given).removesuffix("<|im_end|>") if given else "yes"

    return script


async def played(world: World, claim: dict[str, Any]) -> Episode:
    async with aiohttp.ClientSession() as http:
        requests = JsonRequests(http, retry=Retry(deadline_s=5))
        gateway = GatewayClient(requests, url=world.base_url, admin_key=ADMIN_KEY)
        episode = Episode(
            msgspec.convert(
                {**claim, "task": msgspec.Raw(msgspec.json.encode(claim["task"]))}, Claim
            ),
            gateway=gateway,
            requests=requests,
            environ={},
            telemetry=Telemetry(service="agents"),
        )
        await supervised.play(episode)
        return episode


async def test_every_reply_is_given_behind_the_tokens_of_those_before_it(model: Path) -> None:
    worlds: list[World] = []
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, with_talks(model), reading(worlds)) as (world, lanes):
        worlds.append(world)
        group_id = (await world.admin("POST", "/v1/groups", REQUEST)).json()["group_id"]
        await world.admit(group_id)
        claim = await world.claim(group_id)
        episode = await played(world, claim)
        path = f"/v1/episodes/{claim['episode_id']}/finish"
        await world.admin("POST", path, {"result": episode.result})
        [end] = await world.records(topics.FINISHED_EPISODES)
        done = await world.records(topics.FINISHED_COMPLETIONS)
        asked = [each.record for lane in lanes for each in lane.seen]
    ordered = sorted(asked, key=lambda each: each.turn.sequence)
    given = [world.rendering.decode(unpack_ids(each.given)) for each in ordered]
    assert given == [
        '<tool_call>\n{"name": "price", "arguments": {"item": "pen"}}\n</tool_call><|im_end|>',
        "It is 7.<|im_end|>",
        "14.<|im_end|>",
    ]
    assert {(each.sampling.temperature, each.sampling.top_p) for each in ordered} == {(1.0, 1.0)}
    assert [each.parent_id for each in ordered] == [None, *(e.request_id for e in ordered[:2])]
    assert (end.source, end.purpose, end.forks, len(end.manifest)) == ("import", "train", 0, 3)
    assert [(reward.name, reward.value) for reward in end.rewards] == [("outcome", 0.5)]
    assert end.result == b'"14"'
    # The tokens that train are those of the model's template over the whole conversation.
    last = contexts_of(done)[ordered[-1].request_id]
    messages, tools = TALK["messages"], TALK["tools"]
    prompt = world.rendering.render(messages[:-1], tools=tools).ids
    reply = unpack_ids(world.rendering.reply_tokens(messages[:-1], messages[-1], tools=tools))
    assert last == [*prompt, *reply]


async def test_a_conversation_that_outgrows_the_context_ends_with_the_last_reply_that_fits(
    model: Path,
) -> None:
    worlds: list[World] = []
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    configuration = with_talks(model, context_tokens_max=256)
    long = [*TALK["messages"], {"role": "user", "content": "why?"}]
    long.append({"role": "assistant", "content": "since " * 300})
    async with running(log, configuration, reading(worlds)) as (world, lanes):
        worlds.append(world)
        request = {**REQUEST, "task": {**TALK, "messages": long}}
        group_id = (await world.admin("POST", "/v1/groups", request)).json()["group_id"]
        await world.admit(group_id)
        with pytest.raises(Exception, match="context"):
            await played(world, await world.claim(group_id))
        asked = [each for lane in lanes for each in lane.seen]
    assert len(asked) == 3


async def test_replies_are_given_in_supervised_episodes_and_in_no_others(model: Path) -> None:
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    hello: list[Any] = [{"role": "user", "content": "hello"}]
    reply = {"forgemq_reply": {"role": "assistant", "content": "hi"}}
    async with running(log, with_talks(model), lambda _: "yes") as (world, lanes):
        sampled = world.client(await world.episode())
        with pytest.raises(openai.BadRequestError, match="must be left out: the replies of this"):
            await sampled.chat.completions.create(model="m", messages=hello, extra_body=reply)
        group_id = (await world.admin("POST", "/v1/groups", REQUEST)).json()["group_id"]
        await world.admit(group_id)
        given = world.client(await world.claim(group_id))
        with pytest.raises(openai.BadRequestError, match="must be given: this episode is imported"):
            await given.chat.completions.create(model="m", messages=hello)
        wrong: dict[str, dict[str, Any]] = {
            "forgemq_reply must be a message of the assistant": {
                "forgemq_reply": {"role": "user", "content": "hi"}
            },
            "n must be 1 with forgemq_reply": {**reply, "n": 2},
        }
        for message, body in wrong.items():
            with pytest.raises(openai.BadRequestError, match=message):
                await given.chat.completions.create(model="m", messages=hello, extra_body=body)
        asked = [each for lane in lanes for each in lane.seen]
    assert not asked


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"domain": "shop"}, "purpose must be eval: imports of shop never train"),
        ({"source": "agent"}, "source must be import: talks is supervised"),
    ],
)
async def test_only_imports_train_in_a_supervised_domain_and_only_there(
    model: Path, changes: dict[str, str], message: str
) -> None:
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, with_talks(model), lambda _: "yes") as (world, _):
        answer = await world.admin("POST", "/v1/groups", REQUEST | changes)
        run = (await world.admin("GET", "/v1/run")).json()
        assert not await world.records(topics.REQUESTED_GROUPS)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert run["supervised_domains"] == ["talks"]
