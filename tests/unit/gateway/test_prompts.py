"""Prompts are rendered once and never mixed up."""

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.core.requests import Request, text_of
from forgemq_gateway.large_work import INLINE_SIZE_MAX, LargeWork
from forgemq_gateway.prompts import Prompts, check_fits
from forgemq_gateway.protocols.chat_body import request_of
from forgemq_rendering import Rendered, Rendering

T = TypeVar("T")
MODEL = Path(__file__).parents[3] / "deploy" / "demo" / "model"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CONTEXT_TOKENS_MAX = 40_000
LONG = "price " * INLINE_SIZE_MAX


@pytest.fixture(scope="module")
def rendering() -> Rendering:
    return Rendering.load(str(MODEL), renderer="auto", history="append_only")


def prompts_of(rendering: Rendering, *, bytes_max: int = 1 << 20) -> Prompts:
    return Prompts(
        rendering,
        work=LargeWork("test"),
        context_tokens_max=CONTEXT_TOKENS_MAX,
        bytes_max=bytes_max,
    )


def chat(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Request:
    body = {"messages": [{"role": "user", "content": text}], "tools": tools or None}
    return request_of(msgspec.json.encode(body))


def rendered(rendering: Rendering, request: Request) -> Rendered:
    messages = [{"role": "user", "content": text_of(request.messages[0])}]
    return rendering.render(messages, tools=request.tools)


@pytest.mark.parametrize("text", ["order", " order", LONG])
@pytest.mark.parametrize("tools", [(), (TOOL,)])
async def test_a_prompt_holds_the_tokens_and_ends_of_its_own_messages_and_tools(
    rendering: Rendering, text: str, tools: Sequence[Mapping[str, Any]]
) -> None:
    prompts = prompts_of(rendering)
    for request in (chat("order"), chat(text, tools), chat(text, tools)):
        prompt, expected = await prompts.of(request), rendered(rendering, request)
        assert prompt.tokens == expected.tokens
        assert prompt.message_ends == expected.message_ends


@pytest.mark.parametrize("text", ["order", LONG])
async def test_requests_at_once_and_later_ones_share_one_rendering(
    rendering: Rendering, text: str
) -> None:
    prompts = prompts_of(rendering)
    first, second = await asyncio.gather(prompts.of(chat(text)), prompts.of(chat(text)))
    assert second is first
    assert await prompts.of(chat(text)) is first
    assert prompts.size_bytes == len(first.tokens)


async def test_held_prompts_stay_below_the_limit_and_the_least_recently_used_goes_first(
    rendering: Rendering,
) -> None:
    size = len(rendered(rendering, chat("a")).ids) * 4
    prompts = prompts_of(rendering, bytes_max=2 * size)
    first, second = await prompts.of(chat("a")), await prompts.of(chat("b"))
    assert await prompts.of(chat("a")) is first
    await prompts.of(chat("c"))
    assert prompts.size_bytes == 2 * size
    assert await prompts.of(chat("a")) is first
    assert await prompts.of(chat("b")) is not second


async def test_a_prompt_longer_than_the_limit_is_not_held(rendering: Rendering) -> None:
    prompts = prompts_of(rendering, bytes_max=1)
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
    prompts = prompts_of(Rendering.load(str(tmp_path), renderer="auto", history="append_only"))
    body = {"messages": [{"role": "tool", "tool_call_id": "x", "content": LONG}]}
    request = request_of(msgspec.json.encode(body))
    results = await asyncio.gather(prompts.of(request), prompts.of(request), return_exceptions=True)
    assert [isinstance(result, RefusedError) for result in results] == [True, True], results
    assert prompts.size_bytes == 0


async def test_what_cannot_fit_is_refused_and_nothing_of_it_is_tokenised(
    rendering: Rendering,
) -> None:
    prompts = prompts_of(rendering)
    known = rendering._tokenizer._pieces.size_bytes
    for text in ("x" * 10_000_000, "word-" * 400_000, "\u4e16\u754c" * 1_000_000):
        with pytest.raises(RefusedError) as refused:
            await prompts.of(chat(text))
        assert refused.value.code == "context_length_exceeded"
        assert refused.value.param == "messages"
    assert rendering._tokenizer._pieces.size_bytes == known


def test_what_may_fit_is_not_refused_before_it_is_tokenised(rendering: Rendering) -> None:
    for text in ("a", "price " * 8000, "\u4e16" * 40_000, " " * 1_000_000):
        check_fits(chat(text).messages, rendering=rendering, context_tokens_max=CONTEXT_TOKENS_MAX)


async def test_tools_and_call_arguments_count_in_the_size_that_decides_on_a_thread(
    rendering: Rendering,
) -> None:
    sizes: list[int] = []

    class Noting(LargeWork):
        async def run(self, work: Callable[[], T], *, size: int) -> T:
            sizes.append(size)
            return await super().run(work, size=size)

    prompts = Prompts(rendering, work=Noting("test"), context_tokens_max=CONTEXT_TOKENS_MAX)
    tool = {"type": "function", "function": {"name": "look", "description": "x" * 20_000}}
    call = {"id": "c", "function": {"name": "look", "arguments": '{"a": "' + "y" * 20_000 + '"}'}}
    body = {"messages": [{"role": "assistant", "tool_calls": [call]}]}
    for request in (chat("hi", [tool]), request_of(msgspec.json.encode(body))):
        await prompts.of(request)
    assert min(sizes) > 20_000
