"""Anthropic's messages over a real socket with Anthropic's own client."""

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.protocols.messages_body import request_of
from tests.unit.gateway.scripted_lane import Asked
from tests.unit.gateway.talk import Talk, talk

TOOLS: list[Any] = [
    {
        "name": "find",
        "description": "find things",
        "input_schema": {"type": "object", "properties": {"query": {"type": "string"}}},
    }
]
CALLS = "".join(
    f'<tool_call>\n{{"name": "find", "arguments": {{"query": "{query}"}}}}\n</tool_call>'
    for query in ("a", "b")
)
HELLO: dict[str, Any] = {"role": "user", "content": "hello"}
MORE: dict[str, Any] = {"role": "user", "content": "more"}


async def ask(agent: Talk, *messages: Any, **fields: Any) -> Any:
    return await agent.anthropic.messages.create(
        model="m", max_tokens=100, messages=list(messages), **fields
    )


async def post(agent: Talk, body: Any, *, path: str = "/v1/messages?beta=true") -> httpx.Response:
    betas = {"anthropic-beta": "a-2026-01-01,b-2026-02-02"}
    return await agent.post(path, body, **betas)


def say(text: str) -> Callable[[Asked], str]:
    return lambda _: text


def echoed(answer: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [block.model_dump() for block in answer.content]}


def results(answer: Any) -> dict[str, Any]:
    calls = [block for block in answer.content if block.type == "tool_use"]
    found = [
        {"type": "tool_result", "tool_use_id": call.id, "content": f"no {call.input['query']}"}
        for call in calls
    ]
    return {"role": "user", "content": [*found, {"type": "text", "text": "and now?"}]}


async def test_an_answer_has_its_blocks_in_order_and_its_usage(model: Path) -> None:
    async with talk(model, say(f"<think>\nhm\n</think>\n\nlet me see{CALLS}")) as agent:
        answer = await ask(agent, HELLO, tools=TOOLS, system="you sell")
        seen = agent.seen()[0]
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, first, second = answer.content
    assert (thinking.thinking, text.text.strip()) == ("hm", "let me see")
    assert (first.name, first.input, second.input) == ("find", {"query": "a"}, {"query": "b"})
    assert first.id != second.id
    assert (answer.role, answer.model, answer.stop_reason) == ("assistant", "m", "tool_use")
    assert answer.id == f"msg_{seen.record.request_id}"
    assert answer.usage.input_tokens == len(seen.context)
    assert answer.usage.output_tokens > 0
    assert '{"type": "function", "function": {"name": "find"' in seen.text
    assert seen.text.startswith("<|im_start|>system\nyou sell")


async def test_a_stream_gives_the_same_message_as_a_plain_answer(model: Path) -> None:
    async with talk(model, say(f"<think>\nhm\n</think>\n\nlet me see{CALLS}")) as agent:
        plain = await ask(agent, HELLO, tools=TOOLS)
        async with agent.anthropic.messages.stream(
            model="m", max_tokens=100, messages=[HELLO], tools=TOOLS
        ) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_message()
    assert [strip(block) for block in streamed.content] == [strip(b) for b in plain.content]
    assert streamed.stop_reason == plain.stop_reason
    assert streamed.usage == plain.usage
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


def strip(block: Any) -> dict[str, Any]:
    """A block without what carries its request's id."""
    return {n: v for n, v in block.model_dump().items() if n not in ("id", "signature")}


async def test_sampled_tokens_are_an_exact_prefix_of_the_next_turns_context(model: Path) -> None:
    """Thinking and parallel calls are echoed as blocks; results come in one message with text."""
    script = "<think>\nhm\n</think>\n\nlet me see" + CALLS
    async with talk(
        model, lambda asked: script if asked.text.count("no a") < 3 else "done"
    ) as agent:
        messages: list[Any] = [HELLO]
        while True:
            answer = await ask(agent, *messages, tools=TOOLS, system="you sell")
            if answer.stop_reason != "tool_use":
                break
            messages += [echoed(answer), results(answer)]
        finished, chain = await agent.finished(), await agent.chain()
        ended = await agent.end()
    assert len(chain) == 4
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(chain))
    assert ended.forks == 0
    assert {record.turn.protocol for record in finished} == {"messages"}


async def test_a_signature_says_which_of_two_equal_replies_is_meant(model: Path) -> None:
    async with talk(model, say("<think>\nhm\n</think>\n\nyes")) as agent:
        twins = [await ask(agent, HELLO) for _ in range(2)]
        children = [await ask(agent, HELLO, echoed(twin), MORE) for twin in reversed(twins)]
        finished = {f"msg_{record.request_id}": record for record in await agent.finished()}
    parents = [f"msg_{finished[child.id].parent_id}" for child in children]
    assert parents == [twins[1].id, twins[0].id]


@pytest.mark.parametrize("change", ["dropped", "altered", "foreign signature"])
async def test_an_echo_is_found_whatever_became_of_its_thinking(model: Path, change: str) -> None:
    def changed(answer: Any) -> dict[str, Any]:
        thinking, *rest = echoed(answer)["content"]
        if change == "altered":
            thinking["thinking"] = "other"
        if change == "foreign signature":
            thinking["signature"] = "c29tZXRoaW5n"
        return {"role": "assistant", "content": rest if change == "dropped" else [thinking, *rest]}

    async with talk(model, say("<think>\nhm\n</think>\n\nyes")) as agent:
        answer = await ask(agent, HELLO)
        await ask(agent, HELLO, changed(answer), MORE)
        finished = await agent.finished()
        ended = await agent.end()
    assert finished[1].parent_id == finished[0].request_id
    assert ended.forks == 0


def coding_agents_body(*, nonce: str, reminder: Any = "be quick", **fields: Any) -> dict[str, Any]:
    """The shape of a real coding agent's request: betas, odd tools, a system message in between."""
    return {
        "model": "some-model",
        "max_tokens": 32000,
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: v=1; cch={nonce};"},
            {"type": "text", "text": "you code", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "briefly"},
        ],
        "messages": [HELLO, {"role": "system", "content": reminder}],
        "tools": [*TOOLS, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}],
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
        "metadata": {"user_id": json.dumps({"session_id": "s"})},
        **fields,
    }


async def test_a_coding_agents_body_is_taken_and_its_nonce_is_no_part_of_the_prompt(
    model: Path,
) -> None:
    async with talk(model, say("yes")) as agent:
        first = await post(agent, coding_agents_body(nonce="1"))
        body = coding_agents_body(nonce="2", reminder=[{"type": "text", "text": "be quick"}])
        body["messages"] += [{"role": "assistant", "content": first.json()["content"]}, MORE]
        second = await post(agent, body)
        finished = await agent.finished()
        text = agent.seen()[0].text
    assert (first.status_code, second.status_code) == (200, 200)
    assert finished[1].parent_id == finished[0].request_id
    assert not finished[1].turn.is_fork
    assert "cch=" not in text
    assert "you code\nbriefly" in text
    assert "be quick" in text
    assert "web_search" not in text
    assert first.headers["x-forgemq-unused"] == "thinking"


async def test_the_same_request_without_stream_is_no_second_sample(model: Path) -> None:
    """A coding agent asks again so, if its stream was cut; two clients share one turn."""
    asked, answers = asyncio.Event(), asyncio.Event()

    async def script(_: Asked) -> str:
        asked.set()
        await answers.wait()
        return "yes"

    async with talk(model, script) as agent:
        streamed = asyncio.create_task(post(agent, coding_agents_body(nonce="1", stream=True)))
        await asked.wait()
        plain = asyncio.create_task(post(agent, coding_agents_body(nonce="2")))
        for _ in range(50):  # Each ends after a moment without traffic: the request has come.
            await asyncio.sleep(0.01)
        answers.set()
        events, whole = (await streamed).text, (await plain).json()
        finished = await agent.finished()
    assert len(finished) == 1
    assert whole["content"] == [{"type": "text", "text": "yes"}]
    assert f'"id":"{whole["id"]}"' in events


async def test_a_waiting_stream_gets_pings_before_its_message(model: Path) -> None:
    async def script(_: Asked) -> str:
        await asyncio.sleep(1.0)
        return "yes"

    async with talk(model, script) as agent:
        answer = await post(agent, {"model": "m", "messages": [HELLO], "stream": True})
    names = [line for line in answer.text.splitlines() if line.startswith("event: ")]
    assert names[:2] == ["event: ping", "event: ping"]
    assert names[2] == "event: message_start"
    assert names[-1] == "event: message_stop"


async def test_a_stop_sequence_ends_the_message_and_is_named(model: Path) -> None:
    async with talk(model, say("one two")) as agent:
        answer = await ask(agent, HELLO, stop_sequences=[" two"])
    assert answer.content[0].text == "one"
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " two")


async def test_the_count_of_tokens_is_that_of_the_request_first_and_later(model: Path) -> None:
    async with talk(model, say(f"hm{CALLS}")) as agent:

        async def both(*messages: Any) -> Any:
            counted = await agent.anthropic.messages.count_tokens(
                model="m", messages=list(messages), tools=TOOLS, system="you sell"
            )
            answer = await ask(agent, *messages, tools=TOOLS, system="you sell")
            assert counted.input_tokens == answer.usage.input_tokens
            return answer

        first = await both(HELLO)
        await both(HELLO, echoed(first), results(first))
        sampled = len(agent.seen())
    assert sampled == 2


@pytest.mark.parametrize(
    "tool",
    [
        {"name": "find", "description": "find things"},
        {"type": "custom", "name": "find", "input_schema": None},
        {"type": "function", "function": {"name": "find", "parameters": {}}},  # OpenAI's form.
    ],
)
def test_a_tool_that_the_model_would_not_be_shown_is_refused_by_name(tool: Any) -> None:
    body = {"messages": [HELLO], "tools": [*TOOLS, tool]}
    with pytest.raises(RefusedError) as refused:
        request_of(json.dumps(body).encode())
    assert (refused.value.status, refused.value.param) == (400, "tools[1].input_schema")


async def test_refusals_have_anthropics_shape_and_name_the_field(model: Path) -> None:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png"}}
    async with talk(model, say("yes"), context_tokens_max=256) as agent:
        with pytest.raises(anthropic.BadRequestError) as long:
            await ask(agent, {"role": "user", "content": "many words " * 200})
        with pytest.raises(anthropic.BadRequestError) as image:
            await ask(agent, {"role": "user", "content": [picture]})
        with pytest.raises(anthropic.BadRequestError) as forced:
            await ask(agent, HELLO, tools=TOOLS, tool_choice={"type": "tool", "name": "buy"})
        agent.anthropic.api_key = "wrong"
        with pytest.raises(anthropic.AuthenticationError) as stranger:
            await ask(agent, HELLO)
        elsewhere = await post(agent, {}, path="/v1/messages/batches")
        none = await post(agent, {"model": "m", "messages": []})
    said = [each.value.body["error"] for each in (long, image, forced, stranger)]  # type: ignore[index]
    assert said[0]["type"] == "invalid_request_error"
    assert said[0]["message"].startswith("prompt is too long: ")
    assert said[0]["message"].endswith(" tokens > 256 maximum")
    assert said[1]["message"] == (
        "messages[0].content[0].type: content of type image is not supported: the model reads text"
    )
    assert said[2]["message"] == "tool_choice: tool_choice names 'buy', which is not in tools"
    assert said[3]["type"] == "authentication_error"
    assert elsewhere.status_code == 404
    assert elsewhere.json()["error"]["type"] == "not_found_error"
    assert none.json()["error"]["message"].startswith("messages: ")


async def test_the_list_of_models_has_the_fields_of_both_providers(model: Path) -> None:
    async with talk(model, say("yes")) as agent:
        listed = await agent.anthropic.models.list()
        named = await agent.anthropic.models.retrieve("any-name")
    assert [each.id for each in listed.data] == ["policy"]
    assert (named.id, named.type, named.display_name) == ("any-name", "model", "any-name")
    assert named.created_at.year >= 2024


async def test_tool_choice_none_leaves_what_looks_like_a_call_in_the_text(model: Path) -> None:
    async with talk(model, say(CALLS)) as agent:
        answer = await ask(agent, HELLO, tools=TOOLS, tool_choice={"type": "none"})
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text == CALLS
    assert answer.stop_reason == "end_turn"
