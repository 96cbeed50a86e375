"""The same body again: a retry of an answered request gets its answer, any other a new sample."""

import asyncio
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from forgemq_gateway.core.repetition import repetition
from tests.unit.gateway.scripted_lane import Asked
from tests.unit.gateway.talk import Talk, talk

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
FIRST, RETRY = {"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "1"}
TURN = {"x-codex-turn-metadata": '{"turn_id":"1"}'}


def keyed(key: str) -> dict[str, str]:
    return {"idempotency-key": key}


def counting() -> Any:
    numbers = itertools.count()
    return lambda _: f"sample {next(numbers)}"


async def said(talking: Talk, headers: Mapping[str, str], body: Any = BODY) -> str:
    answer = await talking.post(CHAT, body, **headers)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ({}, {}, False),
        (FIRST, FIRST, False),
        (FIRST, RETRY, True),
        (TURN, TURN, True),
        (keyed("a"), keyed("a"), True),
        (keyed("a"), keyed("b"), False),
        ({}, keyed("a"), False),
    ],
)
async def test_a_body_that_was_answered_gets_that_answer_only_as_a_retry(
    model: Path, first: dict[str, str], second: dict[str, str], is_same: bool
) -> None:
    async with talk(model, counting()) as talking:
        texts = [await said(talking, headers) for headers in (first, second)]
        manifest = (await talking.end()).manifest
    assert texts == ["sample 0", "sample 0" if is_same else "sample 1"]
    assert len(manifest) == (1 if is_same else 2)


async def test_a_retry_gets_its_answer_also_from_a_restarted_gateway(model: Path) -> None:
    async with talk(model, counting()) as talking:
        before = await said(talking, FIRST)
        await talking.restart()
        after = await said(talking, RETRY)
        records = await talking.finished()
    assert (before, after, len(records)) == ("sample 0", "sample 0", 1)


async def test_a_retry_of_an_answer_that_a_request_has_extended_is_another_sample(
    model: Path,
) -> None:
    async with talk(model, counting()) as talking:
        answer = {"role": "assistant", "content": await said(talking, FIRST)}
        longer = {**BODY, "messages": [*BODY["messages"], answer, *BODY["messages"]]}
        await said(talking, FIRST, longer)
        again = await said(talking, RETRY)
    assert again == "sample 2"


async def test_equal_requests_at_the_same_time_are_two_samples_if_their_keys_differ(
    model: Path,
) -> None:
    both = asyncio.Event()
    numbers = itertools.count()

    async def answer(_: Asked) -> str:
        number = next(numbers)
        if number:
            both.set()
        await both.wait()
        return f"sample {number}"

    async with talk(model, answer) as talking:
        texts = await asyncio.gather(*(said(talking, keyed(key)) for key in "ab"))
    assert sorted(texts) == ["sample 0", "sample 1"]


@pytest.mark.parametrize("count", ["", "0", "00", "-1", "x", "\u00b2"])
def test_a_count_that_is_no_number_above_zero_is_no_retry(count: str) -> None:
    assert not repetition({"x-stainless-retry-count": count}, body_digest="d").is_retry
