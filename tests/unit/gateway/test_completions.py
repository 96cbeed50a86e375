"""Completions of prompts without a template, over a real socket with OpenAI's own client."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from forgemq_contracts.arrays import pack_ids, unpack_ids
from forgemq_gateway.core.prompt_paths import PromptPaths, prompt_key
from forgemq_gateway.core.raw_prompts import TextPrompt
from tests.unit.gateway.completions import completion_of
from tests.unit.gateway.scripted_lane import Asked
from tests.unit.gateway.talk import Talk, talk


def say(text: str) -> Callable[[Asked], str]:
    return lambda _: text


async def complete(agent: Talk, prompt: Any, **fields: Any) -> Any:
    return await agent.openai.completions.create(
        model="m", prompt=prompt, **{"max_tokens": 50, **fields}
    )


async def test_a_text_is_the_whole_context_and_its_continuation_the_answer(model: Path) -> None:
    async with talk(model, say(" upon a time")) as agent:
        answer = await complete(agent, "<|im_start|>once")
        seen = agent.seen()[0]
        (record,) = await agent.finished()
    assert answer.choices[0].text == " upon a time"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].matched_stop == 2
    assert answer.id == f"cmpl-{seen.record.request_id}"
    assert seen.text == "<|im_start|>once"
    assert seen.context[0] == 1, "a control token of the prompt is the token"
    assert answer.usage.prompt_tokens == len(seen.context)
    assert answer.usage.completion_tokens == len(unpack_ids(record.output))
    assert (record.turn.protocol, record.turn.is_fork) == ("completions", False)


async def test_a_prompt_that_goes_on_from_an_answer_keeps_its_tokens(model: Path) -> None:
    """ReAct: a stop string ends each answer, and the client writes it again before the result."""
    stop = "\nObservation:"
    async with talk(model, say(f" think\nAction: look{stop}")) as agent:
        prompt = "Question: where?\nThought:"
        for _ in range(3):
            answer = await complete(agent, prompt, stop=[stop])
            assert answer.choices[0].text == " think\nAction: look"
            assert answer.choices[0].matched_stop == stop
            prompt += f"{answer.choices[0].text}{stop} nothing\nThought:"
        await agent.restart()
        await complete(agent, prompt, stop=[stop])
        records, chain = await agent.finished(), await agent.chain()
        ended = await agent.end()
    assert [agent.world.rendering.decode(tokens) for tokens in chain][:-1] == [
        prompt[: len(agent.world.rendering.decode(tokens))] for tokens in chain
    ][:-1]
    for earlier, later in itertools.pairwise(chain):
        assert later[: len(earlier)] == earlier
    assert [record.parent_id for record in records[1:]] == [r.request_id for r in records[:-1]]
    assert ended.forks == 0


async def test_what_ended_an_answer_is_not_put_into_the_middle_of_the_next_prompt(
    model: Path,
) -> None:
    async with talk(model, say(" two")) as agent:
        answer = await complete(agent, "one")
        await complete(agent, f"one{answer.choices[0].text} three")
        first, second = await agent.finished()
    assert agent.seen()[1].text == "one two three"
    assert second.parent_id == first.request_id
    sampled = len(unpack_ids(first.output)) - 1
    assert second.shared_prefix_tokens == len(unpack_ids(first.context)) + sampled


async def test_token_ids_are_taken_and_given_back_exactly(model: Path) -> None:
    async with talk(model, say(" two")) as agent:
        ids = agent.world.rendering.encode("one")
        answer = await complete(agent, ids, extra_body={"return_token_ids": True})
        choice = answer.choices[0]
        assert choice.prompt_token_ids == ids
        await complete(agent, [*ids, *choice.token_ids, *ids])
        with pytest.raises(openai.BadRequestError) as refused:
            await complete(agent, [*ids, 10**6])
        first, second = await agent.finished()
        ended = await agent.end()
    assert choice.token_ids == unpack_ids(first.output)
    assert agent.seen()[1].context == [*ids, *choice.token_ids, *ids]
    assert (second.parent_id, second.context) == (first.request_id, pack_ids(ids))
    assert ended.forks == 0
    assert refused.value.param == "prompt"


async def test_a_list_of_prompts_has_n_choices_for_each_in_order(model: Path) -> None:
    words = itertools.count()
    async with talk(model, lambda asked: f"{asked.text}{next(words)}") as agent:
        answer = await complete(agent, ["a", "b"], n=2)
        stream = await complete(
            agent, [[1, 2], [3]], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        seen = [len(asked.context) for asked in agent.seen()]
        ended = await agent.end()
    assert [choice.text[0] for choice in answer.choices] == ["a", "a", "b", "b"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == sum(seen[:4]) // 2
    assert [choice.index for chunk in chunks for choice in chunk.choices] == [0, 1]
    assert chunks[-1].usage.prompt_tokens == 3
    assert len(ended.manifest) == 6
    reasons = {fork.reason: fork.count for fork in ended.fork_reasons}
    assert reasons == {"resampled": 2, "side_request": 3}


async def test_log_probabilities_are_the_engines(model: Path) -> None:
    async with talk(model, say("yes")) as agent:
        answer = await complete(agent, "a", logprobs=3)
        chat = await agent.openai.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "a"}],
            logprobs=True,
            top_logprobs=3,
        )
        response = await agent.openai.responses.create(
            model="m", input="b", top_logprobs=3, include=["message.output_text.logprobs"]
        )
        await complete(agent, "a")
        records = await agent.finished()
    columns = answer.choices[0].logprobs
    likely = agent.world.rendering.decode([100])
    assert columns.tokens[-1] == "<|im_end|>"
    assert set(columns.token_logprobs) == {-0.5}
    assert columns.top_logprobs[-1] == {"<|im_end|>": -0.5, likely: -1.0}
    assert columns.text_offset[:2] == [0, len(columns.tokens[0])]
    (*_, last) = chat.choices[0].logprobs.content
    assert [(top.token, top.logprob) for top in last.top_logprobs] == [
        ("<|im_end|>", -0.5),
        (likely, -1.0),
    ]
    assert chat.choices[0].matched_stop == 2
    (*_, last) = response.output[0].content[0].logprobs
    assert [top.token for top in last.top_logprobs] == ["<|im_end|>", likely]
    assert [record.top_tokens is None for record in records] == [False] * 3 + [True]


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("suffix", {"suffix": "."}),
        ("echo", {"echo": True}),
        ("best_of", {"best_of": 2}),
        ("logit_bias", {"logit_bias": {"5": 1}}),
        ("logprobs", {"logprobs": 21}),
        ("n", {"n": 17}),
        ("prompt", {"prompt": ["a"] * 9, "n": 2}),
        ("prompt", {"prompt": ""}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": None}),
        ("prompt", {"prompt": "x " * 5000}),
    ],
)
async def test_what_is_not_done_is_refused_by_name(
    model: Path, param: str, fields: dict[str, Any]
) -> None:
    async with talk(model, say("x")) as agent:
        answer = await agent.post("/v1/completions", {"prompt": "a", **fields})
        assert agent.seen() == []
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_the_longest_text_is_continued_and_of_equal_ones_the_newest() -> None:
    paths = PromptPaths()

    def add(number: int, prompt: str, text: str) -> Any:
        completion = completion_of(number, context=[1], output=[2], text=text)
        key = prompt_key(TextPrompt(prompt))
        paths.note(key)
        paths.add(completion, key=key)
        return completion

    add(1, "a", "b")
    add(2, "a", "bc")
    newest = add(3, "ab", "c")
    found = paths.continued(TextPrompt("abcd"))
    assert found is not None
    assert (found.completion, found.behind) == (newest, "cd")
    assert paths.continued(TextPrompt("a")) is None
    assert paths.continued(TextPrompt("ax")) is None
    assert paths.begins_with_one(TextPrompt("ax"))
    assert not paths.begins_with_one(TextPrompt("a"))
