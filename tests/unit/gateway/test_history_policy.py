"""The two policies of an episode for its earlier turns, with a template that strips reasoning."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.domains import histories_of, history_of
from forgemq_contracts.episodes import ForkCount, HistoryPolicy
from forgemq_contracts.run import Episodes, RunConfiguration
from tests.unit.gateway.scripted_lane import Asked, wall_ms
from tests.unit.gateway.talk import Talk
from tests.unit.gateway.world import configuration_of, running
from tests.unit.rendering.folders import STRIPPING_TEMPLATE, write_model_folder

THOUGHT = "<think>\nhm\n</think>\n\n"
CALL = '<tool_call>\n{"name": "find", "arguments": {"query": "a"}}\n</tool_call>'
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
]
HEAD = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
NEXT = "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("policy") / "m", template=STRIPPING_TEMPLATE)


def with_history(
    configuration: RunConfiguration,
    *,
    run: HistoryPolicy = "append_only",
    domain: HistoryPolicy | None = None,
) -> RunConfiguration:
    """The configuration with these policies, of the run and of its one domain."""
    (queue,) = configuration.queues
    return msgspec.structs.replace(
        configuration,
        episodes=msgspec.structs.replace(configuration.episodes, history=run),
        queues=(msgspec.structs.replace(queue, history=domain),),
    )


@asynccontextmanager
async def thinking(
    configuration: RunConfiguration, *, say: str = f"{THOUGHT}good day"
) -> AsyncIterator[Talk]:
    """An episode over a lane that thinks, then says this; after a tool's result it says `done`."""

    def script(asked: Asked) -> str:
        return f"{THOUGHT}done" if asked.text.count("<tool_response>") else say

    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configuration, script) as (world, lanes):
        talking = Talk(world, lanes, await world.episode())
        async with talking.anthropic:
            yield talking


async def converse(talk: Talk, *, tools: Any = None) -> tuple[list[Any], str]:
    """Two questions, the reply to the first one echoed as a client without reasoning does."""
    extra = {"tools": tools} if tools else {}
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    first = await talk.openai.chat.completions.create(model="m", messages=messages, **extra)
    said = first.choices[0].message
    messages += [
        {"role": "assistant", "content": said.content},
        {"role": "user", "content": "more"},
    ]
    await talk.openai.chat.completions.create(model="m", messages=messages, **extra)
    return messages, str(said.content)


def ids_of(talk: Talk, text: str) -> list[int]:
    return talk.world.rendering.encode(text)


async def test_append_only_keeps_the_sampled_reasoning_in_the_next_prompt(thinker: Path) -> None:
    async with thinking(configuration_of(thinker)) as talk:
        _, said = await converse(talk)
        first, second = talk.seen()
        one, two = await talk.finished()
        ended = await talk.end()
    assert "hm" not in said
    assert first.context == ids_of(talk, HEAD)
    assert second.context == ids_of(talk, f"{HEAD}{THOUGHT}good day{NEXT}")
    assert (two.parent_id, two.shared_prefix_tokens) == (
        one.request_id,
        len(first.context) + len(one.output) // 4,
    )
    assert ended.fork_reasons == ()


async def test_append_only_keeps_an_answer_that_ended_within_its_reasoning(tmp_path: Path) -> None:
    """Under Qwen3's own renderer, which by itself would write an empty message in its place."""
    qwen3 = write_model_folder(tmp_path / "m", name="Qwen/Qwen3-4B")
    async with thinking(configuration_of(qwen3), say="<think>\nhm") as talk:
        _, said = await converse(talk)
        _, second = talk.seen()
        ended = await talk.end()
    assert said == ""
    assert second.context == ids_of(talk, f"{HEAD}<think>\nhm{NEXT}")
    assert ended.fork_reasons == ()


async def test_template_sends_the_prompt_that_the_template_renders_and_counts_the_fork(
    thinker: Path,
) -> None:
    async with thinking(with_history(configuration_of(thinker), run="template")) as talk:
        await converse(talk)
        first, second = talk.seen()
        one, two = await talk.finished()
        ended = await talk.end()
        (opened,) = await talk.world.records(topics.OPENED_EPISODES)
    assert opened.history == "template"
    assert first.context == ids_of(talk, HEAD)
    assert second.context == ids_of(talk, f"{HEAD}good day{NEXT}")
    assert (two.parent_id, two.shared_prefix_tokens) == (one.request_id, len(first.context))
    assert (two.turn.is_fork, two.turn.fork_reason) == (True, "rewritten")
    assert ended.fork_reasons == (ForkCount(reason="rewritten", count=1),)


async def test_under_template_a_rendering_that_begins_with_the_sampled_tokens_is_no_fork(
    thinker: Path,
) -> None:
    """The reply has no reasoning, so the template writes it as it was sampled."""
    plain = with_history(configuration_of(thinker), run="template")
    async with thinking(plain, say="good day") as talk:
        await converse(talk)
        first, second = talk.seen()
        one, two = await talk.finished()
        await talk.restart()
        more: list[Any] = [{"role": "user", "content": "hello"}]
        more += [{"role": "assistant", "content": "good day"}, {"role": "user", "content": "more"}]
        more += [{"role": "assistant", "content": "good day"}, {"role": "user", "content": "bye"}]
        await talk.openai.chat.completions.create(model="m", messages=more)
        *_, three = await talk.finished()
        ended = await talk.end()
    whole = len(first.context) + len(one.output) // 4
    assert second.context == ids_of(talk, f"{HEAD}good day{NEXT}")
    assert (two.parent_id, two.shared_prefix_tokens) == (one.request_id, whole)
    assert msgspec.json.decode(two.turn.messages) == [{"role": "user", "content": "more"}]
    assert (three.parent_id, three.turn.is_fork) == (two.request_id, False)
    assert ended.fork_reasons == ()


async def test_under_template_the_reasoning_behind_the_newest_question_stays(thinker: Path) -> None:
    """A tool's result is no question: the client echoes the reasoning, and the turn goes on."""
    configuration = with_history(configuration_of(thinker), run="template")
    async with thinking(configuration, say=THOUGHT + CALL) as talk:
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        answer = await talk.post("/v1/chat/completions", {"messages": messages, "tools": TOOLS})
        said = answer.json()["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "b"}
        await talk.post(
            "/v1/chat/completions", {"messages": [*messages, said, result], "tools": TOOLS}
        )
        one, two = await talk.finished()
        ended = await talk.end()
    assert said["reasoning_content"] == "hm"
    assert two.parent_id == one.request_id
    assert two.turn.is_fork is False
    assert THOUGHT in talk.seen()[1].text
    assert ended.fork_reasons == ()


@pytest.mark.parametrize("history", ["append_only", "template"])
async def test_counted_tokens_are_those_of_the_prompt_under_either_policy(
    thinker: Path, history: HistoryPolicy
) -> None:
    async with thinking(with_history(configuration_of(thinker), run=history)) as talk:
        body = {"max_tokens": 99, "messages": [{"role": "user", "content": "hello"}]}
        first = (await talk.post("/v1/messages", body)).json()
        turns = [{"role": "assistant", "content": first["content"]}]
        turns += [{"role": "user", "content": "more"}]
        body = body | {"messages": [*body["messages"], *turns]}
        counted = (await talk.post("/v1/messages/count_tokens", body)).json()["input_tokens"]
        await talk.post("/v1/messages", body)
        _, second = talk.seen()
    assert counted == len(second.context)
    assert (THOUGHT in second.text) == (history == "append_only")


async def test_under_template_a_request_that_leaves_the_tools_out_forks_as_other_tools(
    thinker: Path,
) -> None:
    configuration = with_history(configuration_of(thinker), run="template")
    async with thinking(configuration, say="good day") as talk:
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        await talk.post("/v1/chat/completions", {"messages": messages, "tools": TOOLS})
        messages += [{"role": "assistant", "content": "good day"}, {"role": "user", "content": "x"}]
        await talk.post("/v1/chat/completions", {"messages": messages})
        ended = await talk.end()
    assert ended.fork_reasons == (ForkCount(reason="other_tools", count=1),)


async def test_a_domains_policy_holds_in_place_of_the_runs(thinker: Path) -> None:
    configuration = with_history(configuration_of(thinker), run="template", domain="append_only")
    async with thinking(configuration) as talk:
        await converse(talk)
        (opened,) = await talk.world.records(topics.OPENED_EPISODES)
    assert opened.history == "append_only"
    assert talk.seen()[1].context == ids_of(talk, f"{HEAD}{THOUGHT}good day{NEXT}")


def test_a_domain_without_a_policy_has_that_of_the_run(thinker: Path) -> None:
    configuration = with_history(configuration_of(thinker), run="template")
    (queue,) = configuration.queues
    other = msgspec.structs.replace(queue, domain="desk", history="append_only")
    both = msgspec.structs.replace(configuration, queues=(queue, other))
    assert history_of(both, domain="shop") == "template"
    assert history_of(both, domain="desk") == "append_only"
    assert histories_of(both) == ("template", "append_only")
    assert Episodes().history == "append_only"
