"""Environments of verifiers as agents: rewards, tools, and who caused an end."""

import asyncio
import json
import os
import time
from collections.abc import Sequence
from io import StringIO
from typing import Any, NamedTuple

import aiohttp
import msgspec
import pytest
import verifiers as vf
from aiohttp import web
from msgspec import UNSET, Raw

from forgemq_agents.environment_agent import EnvironmentAgent
from forgemq_agents.episode_player import EpisodePlayer
from forgemq_agents.gateway_client import GatewayClient
from forgemq_agents.lease_thread import LeaseThread
from forgemq_agents.requests import JsonRequests, Retry
from forgemq_contracts.admin import AbortRequest, FinishRequest, GroupRequest
from forgemq_telemetry.telemetry import Telemetry
from tests.memory_gateway import COMPLETION_ID
from tests.memory_gateway_http import refused
from tests.unit.agents.environments import (
    ROW,
    Guessing,
    broken,
    length,
    not_finite,
    right,
    single_turn,
    tool_env,
    wait,
)

pytestmark = pytest.mark.usefixtures("kept_signal_handlers")

CONTEXT_FULL = "This model's maximum context length is 8 tokens. However, your messages have 9."
SILENT = Telemetry(service="agents", stream=StringIO())


class Late(web.Response):
    """An answer that comes after `late_s`."""

    late_s = 0.0

    async def prepare(self, request):
        wait(self.late_s)
        return await super().prepare(request)


def said(
    content: str = "",
    *,
    finish: str = "stop",
    calls: Sequence[tuple[str, str]] = (),
    late_s: float = 0,
) -> Late:
    """An answer of the policy; a call is (name, arguments)."""
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    if calls:
        message["tool_calls"] = [
            {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for n, (name, arguments) in enumerate(calls)
        ]
    choice = {"index": 0, "message": message, "finish_reason": finish}
    body = {
        "id": f"chatcmpl-{COMPLETION_ID}",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [choice],
    }
    answer = Late(text=json.dumps(body), content_type="application/json")
    answer.late_s = late_s
    return answer


class Played(NamedTuple):
    """What became of one episode, at the gateway."""

    end: FinishRequest | AbortRequest
    rewards: tuple[tuple[str, float], ...]
    requests: tuple[dict[str, Any], ...]

    @property
    def result(self) -> Any:
        return msgspec.json.decode(self.end.result)


async def played(start, environment, *answers: web.Response, row: Any = ROW) -> Played:
    """Play one episode with the agents' service code; the policy gives these answers."""
    gateway = await start(group_size=1)
    retry = Retry(deadline_s=20)
    leases = LeaseThread(url=gateway.url, admin_key="admin", retry=retry)
    async with aiohttp.ClientSession() as http, leases:
        requests = JsonRequests(http, retry=retry)
        client = GatewayClient(requests, url=gateway.url, admin_key="admin")
        asked = GroupRequest(
            domain="count", idempotency_key="count/0", task=Raw(msgspec.json.encode(row))
        )
        status = await client.request_group(asked)
        claim = await client.claim(status.group_id)
        gateway.answers += answers
        player = EpisodePlayer(
            gateway=client, requests=requests, leases=leases, environ=os.environ, telemetry=SILENT
        )
        async with asyncio.timeout(30):
            await player.play(claim, EnvironmentAgent(environment))
    (group,) = gateway.in_order()
    assert gateway.answers == []
    return Played(
        end=group.ended[0],
        rewards=tuple((reward.name, reward.value) for reward in gateway.rewards),
        requests=tuple(json.loads(body) for body in gateway.chats),
    )


def said_five() -> Any:
    return said("5")


async def test_the_rubric_makes_the_reward_and_its_metrics_are_in_the_result(memory_gateway):
    environment = single_turn(right, length, weights=[1.0, 0.5])
    episode = await played(memory_gateway, environment, said("4"))
    assert episode.rewards == (("outcome", 1.5),)
    assert episode.result == {
        "reward": 1.5,
        "metrics": {"right": 1.0, "length": 1.0, "num_turns": 1.0},
        "stop_condition": "max_turns_reached",
    }
    assert episode.end.truncated_by is UNSET
    assert episode.requests == ({"model": "policy", "messages": ROW["prompt"], "n": 1},)


async def test_a_dialogue_goes_on_until_the_environment_ends_it(memory_gateway):
    episode = await played(memory_gateway, Guessing(), said("5"), said("4"))
    assert episode.rewards == (("outcome", 1.0),)
    assert episode.result["stop_condition"] == "is_right"
    assert episode.requests[1]["messages"] == [
        *ROW["prompt"],
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "Wrong."},
    ]


async def test_tools_are_offered_called_and_answered(memory_gateway):
    answers = (said(calls=[("add", '{"a": 2, "b": 2}'), ("add", '{"a": "x"}')]), said("4"))
    episode = await played(memory_gateway, tool_env(), *answers)
    assert episode.rewards == (("outcome", 1.0),)
    assert episode.result["metrics"]["add_calls"] == 2.0
    first, second = episode.requests
    assert [tool["function"]["name"] for tool in first["tools"]] == ["add"]
    called, *results = second["messages"][1:]
    assert called["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2, "b": 2}'}
    assert [(each["role"], each["tool_call_id"]) for each in results] == [
        ("tool", "c0"),
        ("tool", "c1"),
    ]
    assert results[0]["content"] == "4"
    assert "missing 1 required positional argument" in results[1]["content"]


async def test_sampling_arguments_of_the_environment_are_sent_in_each_turn(memory_gateway):
    sampling = {"max_tokens": 9, "stop": ["."], "extra_body": {"top_k": 3}}
    environment = Guessing()
    environment.sampling_args |= sampling
    episode = await played(memory_gateway, environment, said("5"), said("4"))
    asked = {"max_completion_tokens": 9, "stop": ["."], "top_k": 3, "n": 1}
    assert all(asked.items() <= request.items() for request in episode.requests)


async def test_the_time_between_turns_is_tool_time_and_that_of_turns_is_not(memory_gateway):
    began_s = time.monotonic()
    answers = (said("5", late_s=0.1), said("4", late_s=0.1))
    episode = await played(memory_gateway, Guessing(pause_s=0.1), *answers)
    assert 0.1 <= episode.end.tool_s <= time.monotonic() - began_s - 0.2


@pytest.mark.parametrize(
    ("make", "answers", "limit", "reward"),
    [
        (single_turn, [lambda: said("4", finish="length")], "turn_too_long", 1.0),
        (
            lambda: Guessing(),
            [lambda: said("5"), lambda: refused(400, CONTEXT_FULL, code="context_length_exceeded")],
            "context_full",
            0.0,
        ),
        (
            lambda: tool_env(max_turns=1),
            [lambda: said("4", calls=[("add", "{}")])],
            "too_many_turns",
            1.0,
        ),
    ],
    ids=["turn_too_long", "context_full", "too_many_turns"],
)
async def test_a_limit_that_the_policy_ran_into_is_named_and_scored(
    memory_gateway, make, answers, limit, reward
):
    episode = await played(memory_gateway, make(), *(answer() for answer in answers))
    assert isinstance(episode.end, FinishRequest)
    assert (episode.end.truncated_by, episode.rewards) == (limit, (("outcome", reward),))


@pytest.mark.parametrize(
    ("make", "answer", "detail"),
    [
        (single_turn, said, "EmptyModelResponseError: Model returned no content"),
        (
            lambda: tool_env(stop_errors=[json.JSONDecodeError]),
            lambda: said(calls=[("add", "{")]),
            "ToolParseError, by JSONDecodeError",
        ),
    ],
    ids=["nothing_said", "unreadable_call"],
)
async def test_an_end_by_what_the_policy_wrote_is_scored_also_if_a_reward_function_fails(
    memory_gateway, make, answer, detail
):
    episode = await played(memory_gateway, make(), answer())
    assert isinstance(episode.end, FinishRequest)
    assert episode.end.truncated_by == "declared"
    assert detail in episode.end.detail
    assert episode.rewards == (("outcome", 0.0),)


@pytest.mark.parametrize(
    ("make", "answer", "detail"),
    [
        (single_turn, lambda: refused(400, "no such field"), "ModelError, by BadRequestError"),
        (lambda: Guessing(fault=RuntimeError("no disk")), said_five, "no disk"),
        (lambda: Guessing(fault=vf.SandboxError("gone")), said_five, "SandboxError: gone"),
        (
            lambda: tool_env(stop_errors=[TypeError]),
            lambda: said(calls=[("add", "{}")]),
            "ToolCallError, by TypeError",
        ),
        (lambda: single_turn(right, broken), said_five, "broken raised LookupError: no such"),
        (
            lambda: single_turn(not_finite),
            said_five,
            "not_finite raised ValueError: must return a finite number, got nan",
        ),
        (
            lambda: single_turn(right, weights=[1e13]),
            lambda: said("4"),
            "reward must be within 1e12 of 0, got 10000000000000.0",
        ),
    ],
    ids=["refused", "environment", "sandbox", "tool", "reward_function", "not_finite", "too_large"],
)
async def test_what_the_policy_did_not_cause_masks_the_episode(
    memory_gateway, make, answer, detail
):
    episode = await played(memory_gateway, make(), answer())
    assert isinstance(episode.end, AbortRequest)
    assert detail in episode.end.detail
    assert episode.rewards == ()


@pytest.mark.parametrize("metric", [broken, not_finite])
async def test_a_metric_may_fail_since_it_moves_no_reward(memory_gateway, metric):
    environment = single_turn(right, metric, weights=[1.0, 0.0])
    episode = await played(memory_gateway, environment, said("4"))
    assert episode.rewards == (("outcome", 1.0),)
    assert episode.result["metrics"][metric.__name__] == 0.0


async def test_failures_are_heard_from_the_rubric_of_a_grouped_environment(memory_gateway):
    group = vf.EnvGroup([single_turn(right), single_turn(broken)], env_names=["well", "badly"])
    row = {**ROW, "task": "well"}
    assert (await played(memory_gateway, group, said("4"), row=row)).rewards == (("outcome", 1.0),)
    episode = await played(memory_gateway, group, said("4"), row={**ROW, "task": "badly"})
    assert "broken raised LookupError" in episode.end.detail
