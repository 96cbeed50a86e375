"""OpenAI responses over a real socket with OpenAI's own client."""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from forgemq_gateway.core.errors import context_overflow
from forgemq_gateway.protocols.responses import ResponseStream
from tests.unit.gateway.scripted_lane import Asked
from tests.unit.gateway.talk import Talk, talk

FIND: dict[str, Any] = {
    "type": "function",
    "name": "find",
    "description": "find things",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    "strict": False,
}
TOOLS: list[Any] = [FIND]
CALLS = "".join(
    f'<tool_call>\n{{"name": "find", "arguments": {{"query": "{query}"}}}}\n</tool_call>'
    for query in ("a", "b")
)
THOUGHT = "<think>\nhm\n</think>\n\nlet me see"


async def ask(agent: Talk, given: Any, **fields: Any) -> Any:
    return await agent.openai.responses.create(model="m", input=given, **fields)


def echoed(answer: Any) -> list[Any]:
    return [item.model_dump(exclude_none=True) for item in answer.output]


def outputs(answer: Any) -> list[Any]:
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": "none found"}
        for item in answer.output
        if item.type == "function_call"
    ]


def searching(asked: Asked) -> str:
    """Two parallel calls, three times; then the end."""
    return THOUGHT + CALLS if asked.text.count("none found") < 6 else "done"


def grows(chain: list[list[int]]) -> bool:
    """Whether every turn's tokens begin with all those of the turn before."""
    return all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(chain))


async def test_an_answer_has_its_items_in_order_and_its_usage(model: Path) -> None:
    async with talk(model, lambda _: THOUGHT + CALLS) as agent:
        answer = await ask(agent, "hello", tools=TOOLS, instructions="you sell")
        seen = agent.seen()[0]
    assert [item.type for item in answer.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert answer.output[0].summary[0].text == "hm"
    assert answer.output_text.strip() == "let me see"
    assert [json.loads(item.arguments) for item in answer.output[2:]] == [
        {"query": "a"},
        {"query": "b"},
    ]
    assert (answer.status, answer.model) == ("completed", "m")
    assert answer.id == f"resp_{seen.record.request_id}"
    assert answer.usage.input_tokens == len(seen.context)
    assert len({item.id for item in answer.output}) == 4
    assert seen.text.startswith("<|im_start|>system\nyou sell")


async def test_a_stream_gives_the_same_response_as_a_plain_answer(model: Path) -> None:
    async with talk(model, lambda _: THOUGHT + CALLS) as agent:
        plain = await ask(agent, "hello", tools=TOOLS)
        async with agent.openai.responses.stream(model="m", input="hello", tools=TOOLS) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
    kinds = [item.type for item in plain.output]
    assert [item.type for item in streamed.output] == kinds
    assert streamed.output_text == plain.output_text
    assert streamed.usage == plain.usage
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("kept", ["all items", "no ids", "no reasoning", "reasoning as a message"])
async def test_items_that_come_back_keep_the_sampled_tokens(model: Path, kept: str) -> None:
    def changed(item: Any) -> Any:
        if kept == "reasoning as a message" and item["type"] == "reasoning":
            text = f"<think>\n{item['summary'][0]['text']}\n</think>"
            return {"role": "assistant", "content": text}
        without = kept in ("no ids", "reasoning as a message")
        return {n: v for n, v in item.items() if n != "id"} if without else item

    async with talk(model, searching) as agent:
        items: list[Any] = [{"role": "user", "content": "hello"}]
        while True:
            answer = await ask(agent, items, tools=TOOLS, instructions="you sell", store=False)
            if not outputs(answer):
                break
            back = [changed(item) for item in echoed(answer)]
            if kept == "no reasoning":
                back = [item for item in back if item["type"] != "reasoning"]
            items += [*back, *outputs(answer)]
        chain, ended = await agent.chain(), await agent.end()
    assert len(chain) == 4
    assert grows(chain)
    assert ended.forks == 0


async def test_a_conversation_continues_from_the_id_of_its_last_response(model: Path) -> None:
    """Also after the gateway was killed: what it needs is on the log."""
    async with talk(model, searching) as agent:
        answer = await ask(agent, "hello", tools=TOOLS, instructions="you sell")
        while outputs(answer):
            answer = await ask(
                agent,
                outputs(answer),
                tools=TOOLS,
                previous_response_id=answer.id,
                instructions="you sell",
            )
            await agent.restart()
        chain, ended = await agent.chain(), await agent.end()
    assert len(chain) == 4
    assert grows(chain)
    assert ended.forks == 0


async def test_an_id_says_which_of_two_equal_responses_is_continued(model: Path) -> None:
    async with talk(model, lambda _: "yes") as agent:
        twins = [await ask(agent, "hello") for _ in range(2)]
        children = [
            await ask(agent, "more", previous_response_id=twin.id) for twin in reversed(twins)
        ]
        finished = {f"resp_{record.request_id}": record for record in await agent.finished()}
    parents = [f"resp_{finished[child.id].parent_id}" for child in children]
    assert parents == [twins[1].id, twins[0].id]


async def test_a_reference_to_an_item_stands_for_its_reply(model: Path) -> None:
    async with talk(model, searching) as agent:
        items: list[Any] = [{"role": "user", "content": "hello"}]
        answer = await ask(agent, items, tools=TOOLS)
        references = [{"type": "item_reference", "id": item.id} for item in answer.output]
        await ask(agent, [*items, *references, *outputs(answer)], tools=TOOLS)
        mixed = [*references[:2], *echoed(answer)[2:]]
        await ask(agent, [*items, *mixed, *outputs(answer)], tools=TOOLS)
        finished = await agent.finished()
    assert [record.parent_id for record in finished[1:]] == [finished[0].request_id] * 2
    assert not finished[1].turn.is_fork


async def test_a_coding_agents_body_is_taken_with_its_odd_tools(model: Path) -> None:
    body = {
        "model": "some-model",
        "instructions": "you code",
        "input": [
            {"type": "message", "role": "developer", "content": "be brief"},
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "hello"}],
            },
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        ],
        "tools": [
            FIND,
            {"type": "namespace", "name": "files", "tools": []},
            {"type": "web_search", "external_web_access": False},
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "high", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"a": "b"},
        "text": {"verbosity": "low"},
    }
    async with talk(model, lambda _: "yes") as agent:
        answer = await agent.post("/v1/responses", body)
        text = agent.seen()[0].text
    assert answer.status_code == 200
    assert answer.headers["x-forgemq-unused"] == "reasoning"
    assert answer.json()["output"][0]["content"][0]["text"] == "yes"
    assert '"name": "find"' in text
    assert "web_search" not in text


async def test_a_waiting_stream_opens_once_and_then_says_that_it_lives(model: Path) -> None:
    async def script(_: Asked) -> str:
        await asyncio.sleep(1.0)
        return "yes"

    async with talk(model, script) as agent:
        answer = await agent.post("/v1/responses", {"model": "m", "input": "hello", "stream": True})
    events = [
        json.loads(line.removeprefix("data: "))
        for line in answer.text.splitlines()
        if line.startswith("data: ")
    ]
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.in_progress"]
    assert kinds.count("response.created") == 1
    assert kinds[-1] == "response.completed"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1


async def test_an_output_that_was_cut_is_incomplete(model: Path) -> None:
    async with talk(model, lambda _: "one two three four five six seven") as agent:
        short = await ask(agent, "hello", max_output_tokens=2)
    assert short.status == "incomplete"
    assert short.incomplete_details.reason == "max_output_tokens"


async def test_the_count_of_tokens_is_that_of_the_request(model: Path) -> None:
    async with talk(model, lambda _: CALLS) as agent:

        async def count(**body: Any) -> int:
            asked = {"model": "m", "tools": TOOLS, **body}
            answer = await agent.post("/v1/responses/input_tokens", asked)
            return int(answer.json()["input_tokens"])

        counted = await count(input="hello")
        first = await ask(agent, "hello", tools=TOOLS)
        later = await count(input=outputs(first), previous_response_id=first.id)
        second = await ask(agent, outputs(first), tools=TOOLS, previous_response_id=first.id)
    assert counted == first.usage.input_tokens
    assert later == second.usage.input_tokens


async def test_refusals_name_the_field_and_unknown_ids_are_404(model: Path) -> None:
    picture = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
    async with talk(model, lambda _: "yes", context_tokens_max=256) as agent:
        unkept = await ask(agent, "hello", store=False)
        with pytest.raises(openai.NotFoundError, match="store=false is not kept"):
            await ask(agent, "more", previous_response_id=unkept.id)
        with pytest.raises(openai.NotFoundError, match="no item 'msg_x_0'"):
            await ask(agent, [{"type": "item_reference", "id": "msg_x_0"}])
        with pytest.raises(openai.BadRequestError) as long:
            await ask(agent, "many words " * 200)
        with pytest.raises(openai.BadRequestError) as image:
            await ask(agent, picture)
        with pytest.raises(openai.BadRequestError) as nothing:
            await ask(agent, [])
        for elsewhere in ({"conversation": "conv_1"}, {"prompt": {"id": "pmpt_1"}}):
            with pytest.raises(openai.BadRequestError) as unread:
                await ask(agent, "hello", **elsewhere)
            assert [unread.value.param] == list(elsewhere)
    assert long.value.code == "context_length_exceeded"
    assert image.value.param == "input[0].content[0].type"
    assert nothing.value.param == "input"


async def test_an_empty_answer_has_an_item_and_the_next_turn_goes_on_from_it(model: Path) -> None:
    async with talk(model, lambda _: "") as agent:
        first = await ask(agent, "hello", include=["message.output_text.logprobs"])
        question = {"role": "user", "content": "hello"}
        more = {"role": "user", "content": "more"}
        second = await ask(agent, [question, *echoed(first), more])
        reference = {"type": "item_reference", "id": first.output[0].id}
        await ask(agent, [question, reference, more, *echoed(second), more])
        async with agent.openai.responses.stream(model="m", input="another") as stream:
            streamed = await stream.get_final_response()
        chain, ended = await agent.chain(), await agent.end()
    assert [len(answer.output) for answer in (first, second, streamed)] == [1, 1, 1]
    assert first.output_text == streamed.output_text == ""
    assert [each.token for each in first.output[0].content[0].logprobs] == ["<|im_end|>"]
    assert grows(chain[:3])
    assert [(fork.reason, fork.count) for fork in ended.fork_reasons] == [("side_request", 1)]


def test_a_stream_that_fails_names_the_response_that_it_began() -> None:
    stream = ResponseStream()
    begun = stream.keep_alive(request_id="a1", created_s=7, model="m")
    failed = stream.fail(context_overflow(context_tokens=9, context_tokens_max=8))
    responses = [
        json.loads(line.removeprefix(b"data: "))["response"]
        for line in (begun + failed).splitlines()
        if line.startswith(b"data: ") and b'"response":' in line
    ]
    assert [response["status"] for response in responses] == ["in_progress"] * 2 + ["failed"]
    heads = {(each["id"], each["created_at"], each["model"]) for each in responses}
    assert heads == {("resp_a1", 7, "m")}
