"""The longest path of messages and the most paths of an episode, each at its limit."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from forgemq_bus.memory import MemoryLog
from tests.unit.gateway.scripted_lane import wall_ms
from tests.unit.gateway.talk import Talk
from tests.unit.gateway.world import SETTINGS, configuration_of, running

Messages = list[dict[str, Any]]


def chat(messages: Messages) -> Any:
    return {"messages": messages}


BODIES: dict[str, Any] = {
    "/v1/chat/completions": chat,
    "/v1/messages": lambda messages: {"max_tokens": 9, "messages": messages},
    "/v1/responses": lambda messages: {"input": messages},
}


@asynccontextmanager
async def limited(model: Path, **limits: int) -> AsyncIterator[Talk]:
    """An episode over a gateway with these limits; its lane always says yes."""
    log = MemoryLog(run="r", clock_ms=wall_ms).open
    settings = msgspec.structs.replace(SETTINGS, **limits)
    async with running(log, configuration_of(model), lambda _: "yes", settings=settings) as (
        world,
        lanes,
    ):
        talking = Talk(world, lanes, await world.episode())
        async with talking.anthropic:
            yield talking


def said(*texts: str) -> Messages:
    """A talk: texts of the user and of the assistant, in turn."""
    return [
        {"role": "assistant" if number % 2 else "user", "content": text}
        for number, text in enumerate(texts)
    ]


def check_refusal(path: str, answer: httpx.Response, setting: str) -> None:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert f"(FORGEMQ_GATEWAY_{setting})" in error["message"]
    if path == "/v1/messages":
        assert answer.json()["type"] == "error"
    else:
        assert error["param"] == ("input" if path == "/v1/responses" else "messages")


@pytest.mark.parametrize("path", sorted(BODIES))
async def test_a_path_may_have_as_many_messages_as_the_setting_says_and_no_more(
    model: Path, path: str
) -> None:
    async with limited(model, path_messages_max=3) as agent:
        assert (await agent.post(path, BODIES[path](said("a", "yes", "b")))).status_code == 200
        answer = await agent.post(path, BODIES[path](said("a", "yes", "b", "yes", "c")))
        assert "at most 3 messages" in answer.text
        check_refusal(path, answer, "PATH_MESSAGES_MAX")
        assert len(agent.seen()) == 1


async def test_a_response_that_refers_to_earlier_ones_counts_their_messages(model: Path) -> None:
    async with limited(model, path_messages_max=2) as agent:
        first = await agent.post("/v1/responses", {"input": "a"})
        body = {"input": "b", "previous_response_id": first.json()["id"]}
        check_refusal("/v1/responses", await agent.post("/v1/responses", body), "PATH_MESSAGES_MAX")


@pytest.mark.parametrize("path", sorted(BODIES))
async def test_an_episode_may_have_so_many_paths_and_goes_on_with_those_it_has(
    model: Path, path: str
) -> None:
    async with limited(model, episode_paths_max=2) as agent:
        for first in ("a", "b"):
            assert (await agent.post(path, BODIES[path](said(first)))).status_code == 200
        for restarts in range(2):
            answer = await agent.post(path, BODIES[path](said(f"c{restarts}")))
            check_refusal(path, answer, "EPISODE_PATHS_MAX")
            assert "at most 2 paths" in answer.text
            assert "side_request" in answer.text
            more = BODIES[path](said(*["a", "yes"] * (restarts + 1), "a"))
            assert (await agent.post(path, more)).status_code == 200
            await agent.restart()


async def test_a_second_continuation_of_a_reply_is_another_path(model: Path) -> None:
    async with limited(model, episode_paths_max=2) as agent:
        url = "/v1/chat/completions"
        assert (await agent.post(url, chat(said("a")))).status_code == 200
        for number in range(2):
            behind = chat(said("a", "yes", f"b{number}"))
            assert (await agent.post(url, behind)).status_code == 200
        answer = await agent.post(url, chat(said("a", "yes", "b2")))
        check_refusal(url, answer, "EPISODE_PATHS_MAX")
        assert "side_request" in answer.text
        assert (await agent.post(url, chat(said("a", "yes", "b1", "yes", "c")))).status_code == 200


async def test_choices_that_are_sampled_at_once_count_as_the_paths_they_begin(model: Path) -> None:
    async with limited(model, episode_paths_max=3) as agent:
        three = chat(said("a")) | {"n": 3}
        assert (await agent.post("/v1/chat/completions", three)).status_code == 200
        answer = await agent.post("/v1/chat/completions", chat(said("b")))
        check_refusal("/v1/chat/completions", answer, "EPISODE_PATHS_MAX")
        assert len(agent.seen()) == 3


async def test_a_refused_path_uses_up_none(model: Path) -> None:
    async with limited(model, episode_paths_max=1) as agent:
        await agent.post("/v1/chat/completions", chat(said("a")))
        for _ in range(3):
            assert (await agent.post("/v1/chat/completions", chat(said("b")))).status_code == 400
        longer = chat(said("a", "yes", "c"))
        assert (await agent.post("/v1/chat/completions", longer)).status_code == 200
        ended = await agent.end()
    assert (ended.forks, len(ended.manifest)) == (0, 2)
