"""A request for several completions: each is a turn, and the client has all of them or none."""

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from forgemq_contracts import topics
from forgemq_gateway.core.episodes import HeldEpisode
from tests.unit.gateway.scripted_lane import Asked, FailAttempt
from tests.unit.gateway.talk import Talk, talk
from tests.unit.gateway.test_held_and_leased import opened

HELLO: dict[str, Any] = {"role": "user", "content": "hello"}


def numbered() -> Callable[[Asked], str]:
    """Each answer is another word."""
    words = itertools.count()
    return lambda _: f"word {next(words)}"


async def ask(agent: Talk, *messages: Any, **fields: Any) -> Any:
    return await agent.openai.chat.completions.create(model="m", messages=[*messages], **fields)


def texts(answer: Any) -> list[str]:
    return [choice.message.content for choice in answer.choices]


@pytest.mark.slow
async def test_each_choice_is_a_completion_with_its_id_and_one_context(model: Path) -> None:
    async with talk(model, numbered()) as agent:
        answer = await ask(agent, HELLO, n=3)
        finished = {record.request_id: record for record in await agent.finished()}
        ended = await agent.end()
    ids = [choice.completion_id for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.id == f"chatcmpl-{ids[0]}"
    assert sorted(texts(answer)) == ["word 0", "word 1", "word 2"]
    assert set(ids) == set(finished)
    assert len({record.turn.body_digest for record in finished.values()}) == 3
    context = len(agent.seen()[0].context)
    assert answer.usage.prompt_tokens == context
    assert answer.usage.completion_tokens == sum(len(r.output) // 4 for r in finished.values())
    assert {entry.completion_id for entry in ended.manifest} == set(ids)
    assert [(fork.reason, fork.count) for fork in ended.fork_reasons] == [("resampled", 2)]


async def test_the_choice_that_the_client_echoes_is_extended_to_the_token(model: Path) -> None:
    async with talk(model, numbered()) as agent:
        first = await ask(agent, HELLO, n=2)
        chosen = first.choices[1]
        echo = {"role": "assistant", "content": chosen.message.content}
        await ask(agent, HELLO, echo, {"role": "user", "content": "more"}, n=2)
        records = await agent.finished()
        chain = await agent.chain()
    children = records[2:]
    assert [record.parent_id for record in children] == [chosen.completion_id] * 2
    assert not any(record.turn.is_fork for record in children)
    parent = next(n for n, r in enumerate(records) if r.request_id == chosen.completion_id)
    assert all(tokens[: len(chain[parent])] == chain[parent] for tokens in chain[2:])


async def test_a_stream_has_every_choice_under_its_index(model: Path) -> None:
    async with talk(model, numbered()) as agent:
        stream = await ask(
            agent, HELLO, n=2, stream=True, stream_options={"include_usage": True}, logprobs=True
        )
        chunks = [chunk async for chunk in stream]
    found = {
        index: "".join(
            choice.delta.content or ""
            for chunk in chunks
            for choice in chunk.choices
            if choice.index == index
        )
        for index in (0, 1)
    }
    assert sorted(found.values()) == ["word 0", "word 1"]
    ends = [c.index for chunk in chunks for c in chunk.choices if c.finish_reason == "stop"]
    assert ends == [0, 1]
    assert chunks[-1].usage.completion_tokens == sum(
        len(choice.logprobs.content)
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
    )
    logged = [c.index for chunk in chunks for c in chunk.choices if c.logprobs]
    assert logged == [0, 1]


@pytest.mark.slow
async def test_a_retry_gets_the_same_choices_and_a_repetition_others(model: Path) -> None:
    """One choice fails for good; the retry keeps the one that was sampled and asks for the rest."""
    failures = itertools.count()
    words = numbered()

    def script(asked: Asked) -> str:
        if asked.record.turn.sequence == 1 and next(failures) < 3:
            raise FailAttempt("no memory")
        return words(asked)

    async with talk(model, script) as agent:
        with pytest.raises(openai.InternalServerError):
            await ask(agent, HELLO, n=2)
        retried = await ask(agent, HELLO, n=2)
        repeated = await ask(agent, HELLO, n=2)
        delivered = await agent.world.records(topics.DELIVERED_COMPLETIONS)
    assert texts(retried) == ["word 0", "word 1"]
    assert sorted(texts(repeated)) == ["word 2", "word 3"]
    assert [record.is_withdrawn for record in delivered] == [False] * 4


async def test_a_client_that_leaves_before_the_last_choice_comes_back_to_the_first(
    model: Path,
) -> None:
    release = asyncio.Event()

    async def script(asked: Asked) -> str:
        if asked.record.turn.sequence == 1:
            await release.wait()
        return f"turn {asked.record.turn.sequence}"

    async with talk(model, script) as agent:
        with pytest.raises(openai.APITimeoutError):
            await ask(agent, HELLO, n=2, timeout=0.3)
        release.set()
        answer = await ask(agent, HELLO, n=2)
        finished = await agent.finished()
    assert texts(answer) == ["turn 0", "turn 1"]
    assert len({record.request_id for record in finished}) == 2


@pytest.mark.parametrize(("n", "message"), [(17, "n must be at most 16, got 17"), (0, ">= 1")])
async def test_more_choices_than_the_setting_are_refused_by_name(
    model: Path, n: int, message: str
) -> None:
    async with talk(model, numbered()) as agent:
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(agent, HELLO, n=n)
        assert agent.seen() == []
    assert refused.value.param == "n"
    assert message in refused.value.message


def test_choices_are_delivered_when_all_of_them_are() -> None:
    """After a crash between the two records of one delivery, a retry gets both answers again."""
    held = HeldEpisode(opened(0, 0, attempt=0), lease_until_s=0.0)

    def begin(digest: str) -> str:
        return held.begin(digest, matched=None, requested_ms=0, deadline_ms=0).request_id

    ids = [begin("a"), begin("b")]
    assert held.known(["a", "b"]) == ids
    held.delivered.add(ids[0])
    assert held.known(["a", "b"]) == ids
    held.delivered.add(ids[1])
    assert held.known(["a", "b"]) == [None, None]


def test_a_choice_that_no_lane_had_is_not_answered_with_an_earlier_one() -> None:
    held = HeldEpisode(opened(0, 0, attempt=0), lease_until_s=0.0)
    for _ in range(2):
        turns = [held.begin(d, matched=None, requested_ms=0, deadline_ms=0) for d in ("a", "b")]
        held.delivered |= {turn.request_id for turn in turns}
    held.delivered -= {turn.request_id for turn in turns}
    held.forget(turns[1])
    assert held.known(["a", "b"]) == [turns[0].request_id, None]
