"""Renders whole histories, each once: the episodes of a group begin with the same prompt.

To tokenise 200,000 tokens takes a core about half a second; a group of 16 would do it 16 times.
What cannot fit the context is refused before it is tokenised.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import msgspec
from msgspec import Struct

from forgemq_gateway.core.errors import invalid, surely_overflows
from forgemq_gateway.core.requests import (
    Request,
    RequestMessage,
    chat_form,
    shown_texts,
    size_of,
    work_size,
)
from forgemq_gateway.large_work import LargeWork
from forgemq_rendering import Rendering

# About 80 prompts of 200,000 tokens; the open groups of a run begin with far fewer.
_HELD_BYTES_MAX = 64 * 1024 * 1024


class Prompt(Struct, frozen=True, kw_only=True):
    """A rendered history: int32 tokens, and their count up to the end of each message."""

    tokens: bytes
    message_ends: tuple[int, ...]


class Prompts:
    """Rendered prompts by content; the least recently used one is dropped first.

    A prompt that is being rendered is shared by all requests that need it.

    Args:
        rendering: Of the run's model.
        work: Where long histories are rendered.
        context_tokens_max: A longer prompt is refused.
        bytes_max: Limit of all tokens held.
    """

    def __init__(
        self,
        rendering: Rendering,
        *,
        work: LargeWork,
        context_tokens_max: int,
        bytes_max: int = _HELD_BYTES_MAX,
    ) -> None:
        self._rendering = rendering
        self._work = work
        self._context_tokens_max = context_tokens_max
        self._bytes_max = bytes_max
        self._held: OrderedDict[bytes, Prompt] = OrderedDict()
        self._rendering_now: dict[bytes, asyncio.Future[Prompt]] = {}
        self.size_bytes = 0

    async def of(self, request: Request) -> Prompt:
        """Tokens of all messages of the request, rendered now if they are not held.

        Raises:
            RefusedError: 400: the template refuses the messages, or they cannot fit.
        """
        key = await self._work.run(lambda: _key(request), size=_size(request))
        held = self._held.get(key)
        if held is not None:
            self._held.move_to_end(key)
            return held
        under_way = self._rendering_now.get(key)
        if under_way is None:
            under_way = asyncio.ensure_future(self._render(key, request))
            self._rendering_now[key] = under_way
        # Shielded: a client that leaves must not end it for the others that wait for it.
        return await asyncio.shield(under_way)

    async def _render(self, key: bytes, request: Request) -> Prompt:
        def render() -> Prompt:
            check_fits(
                request.messages,
                rendering=self._rendering,
                context_tokens_max=self._context_tokens_max,
            )
            messages = [chat_form(message) for message in request.messages]
            rendered = self._rendering.render(messages, tools=request.tools)
            return Prompt(tokens=rendered.tokens, message_ends=rendered.message_ends)

        try:
            prompt = await self._work.run(render, size=_size(request))
        except ValueError as error:
            raise invalid(str(error), param="messages") from error
        finally:
            self._rendering_now.pop(key, None)
        self._hold(key, prompt)
        return prompt

    def _hold(self, key: bytes, prompt: Prompt) -> None:
        if len(prompt.tokens) > self._bytes_max:
            return
        self._held[key] = prompt
        self.size_bytes += len(prompt.tokens)
        while self.size_bytes > self._bytes_max:
            _, evicted = self._held.popitem(last=False)
            self.size_bytes -= len(evicted.tokens)


def check_fits(
    messages: Sequence[RequestMessage], *, rendering: Rendering, context_tokens_max: int
) -> None:
    """Return if these messages may fit the context; quick, for it tokenises nothing.

    Raises:
        RefusedError: 400: they cannot fit.
    """
    if size_of(messages) <= context_tokens_max:
        return
    tokens_min = rendering.tokens_min(shown_texts(messages))
    if tokens_min > context_tokens_max:
        raise surely_overflows(tokens_min=tokens_min, context_tokens_max=context_tokens_max)


def _size(request: Request) -> int:
    return work_size(request.messages) + len(request.tools_json)


def _key(request: Request) -> bytes:
    """Digest of everything a template may show; match keys leave some of it out."""
    digest = blake2b(request.tools_json, digest_size=16)
    digest.update(msgspec.json.encode(request.messages))
    return digest.digest()
