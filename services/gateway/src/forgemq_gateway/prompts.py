"""Renders whole histories, each once: the episodes of a group begin with the same prompt.

To tokenise 200,000 tokens takes a core about a second; a group of 16 would do it 16 times.
"""

import asyncio
from collections import OrderedDict
from hashlib import blake2b

import msgspec
from msgspec import Struct

from forgemq_contracts.arrays import pack_ids
from forgemq_gateway.core.errors import invalid
from forgemq_gateway.core.requests import Request, characters, chat_form
from forgemq_rendering import Rendering

# To render more text takes over 20 ms, so a thread does it while the loop serves other requests.
INLINE_CHARACTERS_MAX = 32_768

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
        bytes_max: Limit of all tokens held.
    """

    def __init__(self, rendering: Rendering, *, bytes_max: int = _HELD_BYTES_MAX) -> None:
        self._rendering = rendering
        self._bytes_max = bytes_max
        self._held: OrderedDict[bytes, Prompt] = OrderedDict()
        self._rendering_now: dict[bytes, asyncio.Future[Prompt]] = {}
        self.size_bytes = 0

    async def of(self, request: Request) -> Prompt:
        """Tokens of all messages of the request, rendered now if they are not held.

        Raises:
            RefusedError: 400: the template refuses the messages.
        """
        key = _key(request)
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
        messages = [chat_form(message) for message in request.messages]

        def render() -> Prompt:
            rendered = self._rendering.render(messages, tools=request.tools)
            return Prompt(tokens=pack_ids(rendered.ids), message_ends=rendered.message_ends)

        try:
            if characters(request.messages) <= INLINE_CHARACTERS_MAX:
                prompt = render()
            else:
                prompt = await asyncio.to_thread(render)
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


def _key(request: Request) -> bytes:
    """Digest of everything a template may show; match keys leave some of it out."""
    digest = blake2b(request.tools_json, digest_size=16)
    digest.update(msgspec.json.encode(request.messages))
    return digest.digest()
