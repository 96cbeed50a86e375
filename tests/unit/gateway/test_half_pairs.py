"""Halves of surrogate pairs in what agents send: a tool's output that was cut within an emoji."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from forgemq_contracts import topics
from forgemq_contracts.half_pairs import without_halves
from tests.unit.gateway.talk import Talk, talk
from tests.unit.gateway.world import ADMIN_KEY, plain_http

HALF = "found \ud83d"
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": HALF}]},
    "/v1/completions": {"prompt": HALF},
    "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": HALF}]},
    "/v1/responses": {"input": HALF},
}


@pytest.mark.parametrize(
    ("given", "whole"),
    [
        (r'"a\ud83d"', r'"a\ufffd"'),
        (r'"\ude00a"', r'"\ufffda"'),
        (r'"\ud83d\ud83d\ude00\ude00"', r'"\ufffd\ud83d\ude00\ufffd"'),
        (r'"\uD83D\uDE00\ude0"', r'"\uD83D\uDE00\ude0"'),
        (r'"\\ud83d\\\ud83d"', r'"\\ud83d\\\ufffd"'),
        (r'"\n\ud83d', r'"\n\ufffd'),
        ("\\", "\\"),
        (r'"\u00e9"', r'"\u00e9"'),
    ],
)
def test_each_half_is_the_replacement_character_and_all_else_stays(given: str, whole: str) -> None:
    assert without_halves(given.encode()) == whole.encode()


async def post(agent: Talk, path: str, body: Any) -> Any:
    """Post a body that only an encoder that escapes can write."""
    async with plain_http() as client:
        answer = await client.post(
            f"{agent.world.base_url}{path}",
            content=json.dumps(body).encode(),
            headers={"x-api-key": agent.key},
        )
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", sorted(BODIES))
async def test_the_model_reads_the_replacement_character(model: Path, path: str) -> None:
    async with talk(model, lambda _: "yes") as agent:
        await post(agent, path, BODIES[path])
        texts = [asked.text for asked in agent.seen()]
    assert len(texts) == 1
    assert "found \ufffd" in texts[0]


async def test_the_turns_behind_it_go_on_from_what_was_sampled(model: Path) -> None:
    async with talk(model, lambda _: "yes") as agent:
        messages: list[Any] = [{"role": "user", "content": HALF}]
        for _ in range(3):
            answer = await post(agent, "/v1/chat/completions", {"messages": messages})
            messages += [answer["choices"][0]["message"], {"role": "user", "content": HALF}]
        chain, ended = await agent.chain(), await agent.end()
    assert all(later[: len(turn)] == turn for turn, later in itertools.pairwise(chain))
    assert ended.forks == 0


async def test_a_task_and_a_result_have_it_too_whichever_gateway_is_asked(model: Path) -> None:
    told = b'{"domain": "shop", "idempotency_key": "%s", "task": ["\\ud83d", 1.50]}'
    async with talk(model, lambda _: "yes") as agent:
        await agent.world.start_another()
        urls = [gateway.url for gateway in agent.world.gateways]
        async with plain_http() as client:
            client.headers["Authorization"] = f"Bearer {ADMIN_KEY}"
            for number in range(3):
                body, url = told % b"half-%d" % number, urls[number % 2]
                answers = [await client.post(f"{url}/v1/groups", content=body) for _ in range(2)]
                assert [answer.status_code for answer in answers] == [200, 200]
            claim = await agent.world.episode()
            ended = await client.post(
                f"{urls[0]}/v1/episodes/{claim['episode_id']}/finish",
                content=b'{"result": {"said": "\\ud83d"}}',
            )
        requested = await agent.world.records(topics.REQUESTED_GROUPS)
        finished = await agent.world.records(topics.FINISHED_EPISODES)
    halves = [bytes(each.task) for each in requested if each.idempotency_key.startswith("half")]
    assert halves == [b'["\\ufffd", 1.50]'] * 3
    assert (ended.status_code, json.loads(finished[-1].result)) == (200, {"said": "\ufffd"})
