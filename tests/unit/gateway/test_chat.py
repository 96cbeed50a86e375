"""Chat completions over a real socket with OpenAI's own client."""

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.arrays import unpack_ids
from forgemq_gateway.large_work import INLINE_SIZE_MAX
from tests.unit.gateway.scripted_lane import Asked, contexts_of, wall_ms
from tests.unit.gateway.world import configuration_of, plain_http, running

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "find things",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
    }
]
CALL = 'let me see<tool_call>\n{"name": "find", "arguments": {"query": "a"}}\n</tool_call>'
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def log_store() -> Callable[[], MemoryLog]:
    return MemoryLog(run="r", clock_ms=wall_ms).open


def say(text: str) -> Callable[[Asked], str]:
    return lambda asked: text


async def test_an_answer_has_openais_shape_and_usage(model: Path) -> None:
    async with running(log_store(), configuration_of(model), say("good day")) as (world, lanes):
        client = world.client(await world.episode())
        answer = await client.chat.completions.create(model="any", messages=HELLO)
    assert answer.choices[0].message.content == "good day"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "any"
    assert answer.id == f"chatcmpl-{lanes[0].seen[0].record.request_id}"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(lanes[0].seen[0].context)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert lanes[0].seen[0].text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


async def test_a_stream_has_the_same_answer_and_usage_if_asked(model: Path) -> None:
    async with running(log_store(), configuration_of(model), say(CALL)) as (world, _):
        client = world.client(await world.episode())
        stream = await client.chat.completions.create(
            model="m",
            messages=HELLO,
            tools=TOOLS,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    calls = [c for k in chunks if k.choices for c in k.choices[0].delta.tool_calls or []]
    assert text == "let me see"
    assert [(c.index, c.function.name, c.function.arguments) for c in calls if c.function] == [
        (0, "find", '{"query":"a"}')
    ]
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "tool_calls"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0


async def test_sampled_tokens_are_an_exact_prefix_of_the_next_turns_context(model: Path) -> None:
    """An agent loop that re-serialises arguments and drops the text beside its calls."""

    def script(asked: Asked) -> str:
        return CALL if asked.text.count("tool_response") < 6 else "done"

    async with running(log_store(), configuration_of(model), script) as (world, lanes):
        client = world.client(await world.episode())
        messages: list[Any] = [{"role": "system", "content": "you sell"}, *HELLO]
        while True:
            answer = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
            calls = answer.choices[0].message.tool_calls
            if not calls:
                break
            arguments = json.dumps(json.loads(calls[0].function.arguments), indent=2)
            messages.append(
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": calls[0].id,
                            "type": "function",
                            "function": {"name": "find", "arguments": arguments},
                        }
                    ],
                }
            )
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": calls[0].id,
                    "content": [{"type": "text", "text": "nothing"}],
                }
            )
        finished = await world.records(topics.FINISHED_COMPLETIONS)
    assert len(finished) == 4
    whole = contexts_of(finished)
    for before, after in itertools.pairwise(finished):
        tokens = whole[before.request_id]
        assert after.parent_id == before.request_id
        assert after.shared_prefix_tokens == len(tokens)
        assert whole[after.request_id][: len(tokens)] == tokens
        assert not after.turn.is_fork
    assert [asked.record.is_delta for asked in lanes[0].seen] == [False, True, True, True]
    assert lanes[0].known == whole


async def test_a_rewritten_history_forks_and_is_counted(model: Path) -> None:
    async with running(log_store(), configuration_of(model), say("yes")) as (world, _):
        claim = await world.episode()
        client = world.client(claim)
        await client.chat.completions.create(model="m", messages=HELLO)
        changed: list[Any] = [
            *HELLO,
            {"role": "assistant", "content": "never said"},
            {"role": "user", "content": "more"},
        ]
        await client.chat.completions.create(model="m", messages=changed)
        await world.admin("POST", f"/v1/episodes/{claim['episode_id']}/finish", {"result": 1})
        first, second = await world.records(topics.FINISHED_COMPLETIONS)
        ended = (await world.records(topics.FINISHED_EPISODES))[0]
    assert second.turn.is_fork
    assert second.parent_id == first.request_id
    assert second.shared_prefix_tokens == len(unpack_ids(first.context))
    assert ended.forks == 1
    assert [entry.completion_id for entry in ended.manifest] == [
        first.request_id,
        second.request_id,
    ]


async def test_the_episode_pins_sampling_and_records_what_was_asked(model: Path) -> None:
    async with running(log_store(), configuration_of(model), say("x")) as (world, lanes):
        claim = await world.claim(await world.open_group(temperature=0.25))
        client = world.client(claim)
        await client.chat.completions.create(
            model="m",
            messages=HELLO,
            temperature=0,
            top_p=0.1,
            seed=7,
            stop=["END"],
            max_tokens=50,
        )
    record = lanes[0].seen[0].record
    assert claim["temperature"] == 0.25
    assert (record.sampling.temperature, record.sampling.top_p) == (0.25, 1.0)
    assert record.sampling.max_tokens == 50
    assert record.sampling.stop == ("END",)
    assert record.sampling.stop_token_ids == (2,)
    assert json.loads(record.turn.asked) == {
        "temperature": 0,
        "top_p": 0.1,
        "max_tokens": 50,
        "stop": ["END"],
        "seed": 7,
    }


async def test_the_same_body_in_flight_is_sampled_once_and_after_delivery_again(
    model: Path,
) -> None:
    async def slowly(asked: Asked) -> str:
        await asyncio.sleep(0.2)
        return "yes"

    async with running(log_store(), configuration_of(model), slowly) as (world, lanes):
        client = world.client(await world.episode())

        async def ask(*, stream: bool) -> str:
            if not stream:
                answer = await client.chat.completions.create(model="m", messages=HELLO)
                return answer.id
            chunks = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
            return {chunk.id async for chunk in chunks}.pop()

        first, second = await asyncio.gather(ask(stream=False), ask(stream=True))
        third = await ask(stream=False)
    assert first == second != third
    assert [asked.record.turn.ordinal for asked in lanes[0].seen] == [0, 1]


async def test_a_waiting_stream_has_keep_alives_before_and_nothing_after_the_answer(
    model: Path,
) -> None:
    async def slowly(asked: Asked) -> str:
        await asyncio.sleep(1.0)
        return "yes"

    async with running(log_store(), configuration_of(model), slowly) as (world, _):
        claim = await world.episode()
        body = {"model": "m", "messages": HELLO, "stream": True}
        async with plain_http() as client:
            answer = await client.post(
                f"{claim['session_url']}/chat/completions", json=body, timeout=10
            )
    events = [line for line in answer.text.split("\n\n") if line]
    assert events[0] == ": waiting"
    assert json.loads(events[1].removeprefix("data: "))["choices"][0]["delta"] == {}
    assert events.count(": waiting") == 2
    assert events[-1] == "data: [DONE]"
    assert answer.headers["content-type"].startswith("text/event-stream")


async def test_unknown_fields_and_tool_kinds_are_accepted(model: Path) -> None:
    body = {
        "messages": [{"role": "user", "content": "a", "cache_control": {"type": "x"}}],
        "tools": [{"type": "web_search"}, *TOOLS],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "store": False,
        "metadata": {"a": 1},
    }
    async with running(log_store(), configuration_of(model), say(CALL)) as (world, lanes):
        claim = await world.episode()
        async with plain_http() as client:
            answer = await client.post(
                f"{claim['base_url']}/chat/completions",
                json=body,
                headers={"api-key": claim["key"]},
            )
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "find"
    assert "web_search" not in lanes[0].seen[0].text


async def test_tool_choice_none_keeps_tools_in_the_context_and_calls_as_text(model: Path) -> None:
    async with running(log_store(), configuration_of(model), say(CALL)) as (world, lanes):
        client = world.client(await world.episode())
        answer = await client.chat.completions.create(
            model="m", messages=HELLO, tools=TOOLS, tool_choice="none"
        )
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content == CALL
    assert "# Tools" in lanes[0].seen[0].text


async def test_log_probabilities_come_with_each_sampled_token(model: Path) -> None:
    async with running(log_store(), configuration_of(model), say("yes")) as (world, _):
        client = world.client(await world.episode())
        answer = await client.chat.completions.create(model="m", messages=HELLO, logprobs=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == "yes<|im_end|>"
    assert {entry.logprob for entry in logprobs.content} == {-0.5}


async def test_the_context_budget_clamps_the_answer_and_then_refuses(model: Path) -> None:
    configuration = configuration_of(model, context_tokens_max=300)

    async with running(log_store(), configuration, say("a b c")) as (world, lanes):
        client = world.client(await world.episode())
        long: list[Any] = [{"role": "user", "content": "x " * 130}]
        await client.chat.completions.create(model="m", messages=long, max_tokens=200)
        seen = lanes[0].seen[0]
        assert len(seen.context) + seen.record.sampling.max_tokens == 300
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x " * 400}]
            )
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "messages"


async def test_an_answer_with_many_logprobs_has_one_for_each_token_whole_and_streamed(
    model: Path,
) -> None:
    """More than are written in the event loop."""
    said = "jumps over the lazy dog " * 60
    async with running(log_store(), configuration_of(model), say(said)) as (world, _):
        create = world.client(await world.episode()).chat.completions.create
        whole = await create(model="m", messages=[{"role": "user", "content": "a"}], logprobs=True)
        stream = await create(
            model="m", messages=[{"role": "user", "content": "b"}], logprobs=True, stream=True
        )
        streamed = [
            token
            async for chunk in stream
            if chunk.choices[0].logprobs is not None
            for token in chunk.choices[0].logprobs.content or ()
        ]
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert said.startswith("".join(token.token for token in logprobs.content or ()))
    assert [token.token for token in streamed] == [t.token for t in logprobs.content or ()]
    assert len(streamed) > INLINE_SIZE_MAX // 128
