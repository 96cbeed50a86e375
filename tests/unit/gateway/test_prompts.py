"""Prompts are rendered once and never mixed up."""

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forgemq_contracts.arrays import pack_ids
from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.core.requests import Request, text_of
from forgemq_gateway.prompts import INLINE_CHARACTERS_MAX, Prompts
from forgemq_gateway.protocols.chat_completions import ChatCompletions
from forgemq_rendering import Rendered, Rendering

MODEL = Path(__file__).parents[3] / "deploy" / "demo" / "model"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
LONG = "price " * INLINE_CHARACTERS_MAX


@pytest.fixture(scope="module")
def rendering() -> Rendering:
    return Rendering.load(str(MODEL), renderer="auto", history="append_only")


def chat(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Request:
    body = {"messages": [{"role": "user", "content": text}], "tools": tools or None}
    return ChatCompletions().read(msgspec.json.encode(body))


def rendered(rendering: Rendering, request: Request) -> Rendered:
    messages = [{"role": "user", "content": text_of(request.messages[0])}]
    return rendering.render(messages, tools=request.tools)


@pytest.mark.parametrize("text", ["order", " order", LONG])
@pytest.mark.parametrize("tools", [(), (TOOL,)])
async def test_a_prompt_holds_the_tokens_and_ends_of_its_own_messages_and_tools(
    rendering: Rendering, text: str, tools: Sequence[Mapping[str, Any]]
) -> None:
    prompts = Prompts(rendering)
    for request in (chat("order"), chat(text, tools), chat(text, tools)):
        prompt, expected = await prompts.of(request), rendered(rendering, request)
        assert prompt.tokens == pack_ids(expected.ids)
        assert prompt.message_ends == expected.message_ends


@pytest.mark.parametrize("text", ["order", LONG])
async def test_requests_at_once_and_later_ones_share_one_rendering(
    rendering: Rendering, text: str
) -> None:
    prompts = Prompts(rendering)
    first, second = await asyncio.gather(prompts.of(chat(text)), prompts.of(chat(text)))
    assert second is first
    assert await prompts.of(chat(text)) is first
    assert prompts.size_bytes == len(first.tokens)


async def test_held_prompts_stay_below_the_limit_and_the_least_recently_used_goes_first(
    rendering: Rendering,
) -> None:
    size = len(rendered(rendering, chat("a")).ids) * 4
    prompts = Prompts(rendering, bytes_max=2 * size)
    first, second = await prompts.of(chat("a")), await prompts.of(chat("b"))
    assert await prompts.of(chat("a")) is first
    await prompts.of(chat("c"))
    assert prompts.size_bytes == 2 * size
    assert await prompts.of(chat("a")) is first
    assert await prompts.of(chat("b")) is not second


async def test_a_prompt_longer_than_the_limit_is_not_held(rendering: Rendering) -> None:
    prompts = Prompts(rendering, bytes_max=1)
    await prompts.of(chat("a"))
    assert prompts.size_bytes == 0


async def test_what_the_template_refuses_is_refused_to_each_that_asks(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path, dirs_exist_ok=True)
    template = (
        "{%- if messages[0].role == 'tool' %}{{ raise_exception('a tool first') }}{%- endif %}"
    )
    (tmp_path / "chat_template.jinja").write_text(
        template + (MODEL / "chat_template.jinja").read_text()
    )
    prompts = Prompts(Rendering.load(str(tmp_path), renderer="auto", history="append_only"))
    body = {"messages": [{"role": "tool", "tool_call_id": "x", "content": LONG}]}
    request = ChatCompletions().read(msgspec.json.encode(body))
    results = await asyncio.gather(prompts.of(request), prompts.of(request), return_exceptions=True)
    assert [isinstance(result, RefusedError) for result in results] == [True, True], results
    assert prompts.size_bytes == 0
