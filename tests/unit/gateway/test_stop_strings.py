"""Strings at which an agent wants its answers to end: how many an engine takes, and which."""

from pathlib import Path
from typing import Any

import pytest

from forgemq_contracts.episodes import STOP_STRINGS_MAX
from tests.unit.gateway.talk import talk

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": ("stop", {"messages": HELLO}),
    "/v1/completions": ("stop", {"prompt": "hello"}),
    "/v1/messages": ("stop_sequences", {"messages": HELLO, "max_tokens": 9}),
}


@pytest.mark.parametrize("path", sorted(FIELDS))
async def test_as_many_as_an_engine_takes_are_asked_of_it_and_more_are_refused_by_name(
    model: Path, path: str
) -> None:
    field, body = FIELDS[path]
    most = [f"end {index}" for index in range(STOP_STRINGS_MAX)]
    async with talk(model, lambda _: "yes") as agent:
        taken = await agent.post(path, {**body, field: [*most, most[0]]})
        refused = await agent.post(path, {**body, field: [*most, "one more"]})
        stops = [asked.record.sampling.stop for asked in agent.seen()]
    assert (taken.status_code, refused.status_code) == (200, 400)
    assert stops == [tuple(most)]
    error = refused.json()["error"]
    rule = "there must be at most 32 stop strings, with the run's 0, got 33"
    if path == "/v1/messages":
        assert error["message"] == f"stop_sequences: {rule}"
    else:
        assert (error["param"], error["message"]) == ("stop", rule)


@pytest.mark.parametrize("path", sorted(FIELDS))
async def test_an_empty_stop_string_ends_nothing(model: Path, path: str) -> None:
    field, body = FIELDS[path]
    async with talk(model, lambda _: "yes and no") as agent:
        answer = await agent.post(path, {**body, field: ["", "and"]})
        stops = [asked.record.sampling.stop for asked in agent.seen()]
    assert answer.status_code == 200
    assert stops == [("and",)]
    assert '"yes "' in answer.text


async def test_a_stop_that_is_an_empty_text_is_none(model: Path) -> None:
    async with talk(model, lambda _: "yes") as agent:
        answer = await agent.openai.chat.completions.create(model="m", messages=HELLO, stop="")
    assert answer.choices[0].message.content == "yes"
