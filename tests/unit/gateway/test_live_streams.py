"""Streams of a domain with `stream = "live"`: tokens leave while they are sampled."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anthropic
import httpx
import msgspec
import openai
import pytest

from forgemq_bus.memory import MemoryLog
from forgemq_contracts import topics
from forgemq_contracts.run import RunConfiguration
from tests.unit.gateway.scripted_lane import Asked, FailAttempt, ScriptedLane, wall_ms
from tests.unit.gateway.talk import Talk
from tests.unit.gateway.world import SETTINGS, configuration_of, running

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
FIND: list[Any] = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "a"}}\n</tool_call>'

Sample = Callable[[ScriptedLane, Asked], Awaitable[str]]


def live(model: Path) -> RunConfiguration:
    configuration = configuration_of(model)
    (queue,) = configuration.queues
    return msgspec.structs.replace(
        configuration, queues=(msgspec.structs.replace(queue, stream="live"),)
    )


@asynccontextmanager
async def talking(
    configuration: RunConfiguration, sample: Sample, *, lanes: int = 1
) -> AsyncIterator[Talk]:
    """An episode over lanes whose answers are sampled by this function."""
    started: list[ScriptedLane] = []

    def script(asked: Asked) -> Awaitable[str]:
        return sample(started[asked.record.lane], asked)

    log = MemoryLog(run="r", clock_ms=wall_ms).open
    async with running(log, configuration, script, lanes=lanes) as (world, of_world):
        started += of_world
        talk = Talk(world, of_world, await world.episode())
        async with talk.anthropic:
            yield talk


async def chat(talk: Talk, **fields: Any) -> AsyncIterator[str]:
    stream = await talk.openai.chat.completions.create(
        model="m", messages=HELLO, stream=True, **fields
    )
    async for chunk in stream:
        delta = chunk.choices[0].delta
        for text in (getattr(delta, "reasoning_content", None), delta.content):
            if text:
                yield text


async def completions(talk: Talk) -> AsyncIterator[str]:
    async for chunk in await talk.openai.completions.create(model="m", prompt="a", stream=True):
        if chunk.choices[0].text:
            yield chunk.choices[0].text


async def responses(talk: Talk) -> AsyncIterator[str]:
    async for event in await talk.openai.responses.create(model="m", input="hello", stream=True):
        if event.type in ("response.output_text.delta", "response.reasoning_summary_text.delta"):
            yield event.delta  # type: ignore[union-attr]


async def messages(talk: Talk) -> AsyncIterator[str]:
    async with talk.anthropic.messages.stream(model="m", messages=HELLO, max_tokens=100) as stream:
        async for event in stream:
            if event.type in ("text", "thinking"):
                yield event.text if event.type == "text" else event.thinking


@pytest.mark.parametrize("ask", [chat, completions, responses, messages])
async def test_text_leaves_before_the_completion_is_recorded(model: Path, ask: Any) -> None:
    has_read = asyncio.Event()

    async def sample(lane: ScriptedLane, asked: Asked) -> str:
        assert asked.record.is_live
        count = await lane.tell(asked, "good ")
        await lane.tell(asked, "day, fo", start=count)
        await has_read.wait()
        return "good day, fox END"

    texts: list[str] = []
    async with talking(live(model), sample) as talk:
        async for text in ask(talk):
            texts.append(text)
            if "".join(texts) == "good day, fo":
                assert await talk.finished() == []
                has_read.set()
        (delivered,) = await talk.world.records(topics.DELIVERED_COMPLETIONS)
        (finished,) = await talk.finished()
    assert "".join(texts) == "good day, fox END"
    assert len(texts) > 1
    assert delivered.request_id == finished.request_id


@pytest.mark.parametrize("ask", [chat, responses, messages])
async def test_reasoning_leaves_apart_from_the_text(model: Path, ask: Any) -> None:
    has_read = asyncio.Event()

    async def sample(lane: ScriptedLane, asked: Asked) -> str:
        await lane.tell(asked, "<think>\nhm, so")
        await has_read.wait()
        return "<think>\nhm, so it is\n</think>\n\nyes"

    texts: list[str] = []
    async with talking(live(model), sample) as talk:
        async for text in ask(talk):
            texts.append(text)
            has_read.set()
    assert (texts[0], "".join(texts).replace("\n", "")) == ("hm, so", "hm, so it isyes")


async def test_a_call_waits_for_the_record_and_what_is_before_it_does_not(model: Path) -> None:
    has_read = asyncio.Event()

    async def sample(lane: ScriptedLane, asked: Asked) -> str:
        await lane.tell(asked, "I look." + CALL[:20])
        await has_read.wait()
        return "I look." + CALL

    async with talking(live(model), sample) as talk:
        chunks = []
        async for chunk in await talk.openai.chat.completions.create(
            model="m", messages=HELLO, tools=FIND, stream=True
        ):
            chunks.append(chunk.choices[0])
            if chunk.choices[0].delta.content:
                has_read.set()
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "I look."
    assert [call.function.name for call in calls if call.function] == ["find"]
    assert chunks[-1].finish_reason == "tool_calls"


async def test_a_long_call_gets_keep_alives_while_its_tokens_come(model: Path) -> None:
    has_read = asyncio.Event()

    async def sample(lane: ScriptedLane, asked: Asked) -> str:
        count = await lane.tell(asked, CALL[:20])
        with suppress(TimeoutError):
            async with asyncio.timeout(4 * SETTINGS.keepalive_s):
                while not has_read.is_set():
                    await asyncio.sleep(SETTINGS.keepalive_s / 8)
                    count = await lane.tell(asked, "a", start=count)
        return CALL

    before_the_call = []
    async with talking(live(model), sample) as talk:
        async for chunk in await talk.openai.chat.completions.create(
            model="m", messages=HELLO, tools=FIND, stream=True
        ):
            if not chunk.choices[0].delta.tool_calls and not has_read.is_set():
                before_the_call.append(await talk.finished())
                has_read.set()
    assert before_the_call == [[]]


async def test_a_stop_string_and_its_beginning_never_leave(model: Path) -> None:
    has_read = asyncio.Event()

    async def sample(lane: ScriptedLane, asked: Asked) -> str:
        await lane.tell(asked, "good EN")
        await has_read.wait()
        return "good END day"

    texts = []
    async with talking(live(model), sample) as talk:
        async for text in chat(talk, stop=["END"]):
            texts.append(text)
            has_read.set()
    assert "".join(texts) == "good "


async def read(stream: AsyncIterator[str], texts: list[str], sent: asyncio.Event) -> None:
    """Keep the texts of a stream, and say when the first one is there."""
    async for text in stream:
        texts.append(text)
        sent.set()


async def second_attempt(
    lane: ScriptedLane, asked: Asked, *, first: str, then: str, sent: asyncio.Event
) -> str:
    """The first attempt dies when the client has its text; the second one samples `then`."""
    if asked.record.attempt == 0:
        await lane.tell(asked, first)
        await sent.wait()
        raise FailAttempt("engine: gone")
    await lane.tell(asked, then[:4])
    return then


async def test_an_answer_that_another_attempt_samples_otherwise_ends_with_an_error(
    model: Path,
) -> None:
    sent = asyncio.Event()

    async def sample(lane: ScriptedLane, asked: Asked) -> str:
        return await second_attempt(lane, asked, first="good day", then="bad day", sent=sent)

    texts: list[str] = []
    async with talking(live(model), sample, lanes=2) as talk:
        with pytest.raises(openai.APIError, match="sampled again"):
            await read(chat(talk), texts, sent)
        assert await talk.world.records(topics.DELIVERED_COMPLETIONS) == []
        again = [text async for text in chat(talk)]
        ended = await talk.end()
    assert texts == ["good day"]
    assert again == ["bad day"]
    assert [entry.sequence for entry in ended.manifest] == [0]


async def test_an_answer_that_nobody_asks_for_again_does_not_train(model: Path) -> None:
    sent = asyncio.Event()

    async def sample(lane: ScriptedLane, asked: Asked) -> str:
        return await second_attempt(lane, asked, first="good day", then="bad day", sent=sent)

    async with talking(live(model), sample, lanes=2) as talk:
        with pytest.raises(anthropic.APIStatusError):
            await read(messages(talk), [], sent)
        ended = await talk.end()
    assert ended.manifest == ()


async def test_an_answer_goes_on_if_the_next_attempt_samples_the_same(model: Path) -> None:
    sent = asyncio.Event()

    async def sample(lane: ScriptedLane, asked: Asked) -> str:
        return await second_attempt(lane, asked, first="good day", then="good day, fox", sent=sent)

    texts: list[str] = []
    async with talking(live(model), sample, lanes=2) as talk:
        await read(chat(talk), texts, sent)
        (delivered,) = await talk.world.records(topics.DELIVERED_COMPLETIONS)
    assert "".join(texts) == "good day, fox"
    assert not delivered.is_withdrawn


async def test_a_killed_gateway_breaks_the_stream_and_a_retry_gets_the_record(model: Path) -> None:
    goes_on = asyncio.Event()

    async def sample(lane: ScriptedLane, asked: Asked) -> str:
        await lane.tell(asked, "good ")
        await goes_on.wait()
        return "good day"

    async with talking(live(model), sample) as talk:
        stream = chat(talk)
        assert await anext(stream) == "good "
        await talk.restart()
        goes_on.set()
        with pytest.raises(httpx.RemoteProtocolError):
            await anext(stream)
        texts = [text async for text in chat(talk)]
        assert len(talk.seen()) == 1
    assert "".join(texts) == "good day"


@pytest.mark.parametrize("fields", [{"n": 2}, {"logprobs": True}])
async def test_several_choices_and_log_probabilities_wait_for_the_record(
    model: Path, fields: Any
) -> None:
    async def sample(lane: ScriptedLane, asked: Asked) -> str:
        await lane.tell(asked, "good ")
        return "good day"

    async with talking(live(model), sample) as talk:
        texts = [text async for text in chat(talk, **fields)]
        assert not any(asked.record.is_live for asked in talk.seen())
    assert texts == ["good day"] * fields.get("n", 1)


async def test_nothing_is_live_unless_the_domain_says_so(model: Path) -> None:
    async def sample(lane: ScriptedLane, asked: Asked) -> str:
        await lane.tell(asked, "good ")
        return "good day"

    async with talking(configuration_of(model), sample) as talk:
        texts = [text async for text in chat(talk)]
        (asked,) = talk.seen()
        (opened,) = await talk.world.records(topics.OPENED_EPISODES)
    assert texts == ["good day"]
    assert (asked.record.is_live, opened.stream) == (False, "recorded")


async def test_any_gateway_streams_live_and_a_group_that_moves_ends_its_streams(
    model: Path,
) -> None:
    """Six groups over three partitions: a second gateway takes some of them while they stream."""
    goes_on = asyncio.Event()

    async def sample(lane: ScriptedLane, asked: Asked) -> str:
        await lane.tell(asked, "good ")
        await goes_on.wait()
        return "good day"

    configuration = live(model)
    queue = msgspec.structs.replace(configuration.queues[0], groups_requested_max=8)
    async with talking(msgspec.structs.replace(configuration, queues=(queue,)), sample) as first:
        world = first.world
        groups = [await world.open_group(f"key-{number}") for number in range(6)]
        clients = [world.client(await world.claim(group)) for group in groups]
        streams = [streamed(client) for client in clients]
        begun = [await anext(stream) for stream in streams]
        await world.start_another()
        assert await world.eventually(topics.OWNED_RUNS, 2)
        goes_on.set()
        ends = [await rest_of(stream) for stream in streams]
        for client in clients:
            client.base_url = f"{world.base_url}/v1"  # The second gateway.
        again = [await rest_of(streamed(client)) for client in clients]
        asked = len(first.seen())
    assert begun == ["good "] * 6
    assert {"day", "moved"} == set(ends)
    assert again == ["good day"] * 6
    assert asked == 6 + ends.count("day")


async def streamed(client: openai.AsyncOpenAI) -> AsyncIterator[str]:
    async for chunk in await client.chat.completions.create(model="m", messages=HELLO, stream=True):
        if chunk.choices[0].delta.content:
            yield chunk.choices[0].delta.content


async def rest_of(stream: AsyncIterator[str]) -> str:
    """What is left of a stream; `moved` if it ends with that error."""
    try:
        return "".join([text async for text in stream])
    except openai.APIError as error:
        return "moved" if "has moved" in error.message else repr(error)
