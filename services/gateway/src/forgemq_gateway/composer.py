"""From a client's messages to the tokens of a turn, and from sampled tokens to a reply."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from forgemq_contracts.arrays import pack_ids, unpack_floats, unpack_ids
from forgemq_contracts.completions import TurnPart
from forgemq_gateway.core.chat import ChatRequest, rendering_message
from forgemq_gateway.core.episodes import Episode
from forgemq_gateway.core.errors import invalid
from forgemq_gateway.core.history import (
    TAIL_TOKENS,
    TOKEN_BYTES,
    Completion,
    Match,
    tokens_of,
)
from forgemq_gateway.core.replies import Answer, Reply, ReplyCall, TokenLogprob, finish_reason
from forgemq_gateway.core.sampling import used_sampling
from forgemq_gateway.core.turns import Turn
from forgemq_gateway.prompts import INLINE_CHARACTERS_MAX, Prompts, characters
from forgemq_rendering import Rendered, Rendering


class Plan(Struct, frozen=True, kw_only=True):
    """What a request means in its episode, before any token is made."""

    request: ChatRequest
    keys: tuple[str, ...]
    match: Match | None


def plan(request: ChatRequest, *, episode: Episode) -> Plan:
    """Find the sampled turn that this request builds on."""
    keys = episode.history.keys(request.digests, request.call_ids)
    match = episode.history.match(keys)
    if match is not None and not _keeps_tools(match.completion, request):
        match = None
    return Plan(request=request, keys=keys, match=match)


def _keeps_tools(completion: Completion, request: ChatRequest) -> bool:
    """Tools stand in the tokens already; a client that offers none any more leaves them there."""
    return request.tools_digest in ("", completion.tools_digest)


class Composer:
    """Fills turns with tokens and reads replies.

    Args:
        rendering: Of the run's model.
        context_tokens_max: Context and output together.
    """

    def __init__(self, rendering: Rendering, *, context_tokens_max: int) -> None:
        self._rendering = rendering
        self._prompts = Prompts(rendering)
        self._context_tokens_max = context_tokens_max

    async def compose(self, turn: Turn, *, planned: Plan, episode: Episode) -> None:
        """Tokens, parent and sampling of this turn.

        Raises:
            RefusedError: 400: the template refuses the messages or the context is too long.
        """
        request = planned.request
        extension = await self._extension(planned, episode=episode)
        if planned.match is not None and extension is not None:
            parent = planned.match.completion
            turn.parent, turn.shared_tokens = parent, parent.total_tokens
            turn.context = pack_ids(extension.ids)
            first, ends = planned.match.consumed, extension.message_ends
            ends = tuple(turn.shared_tokens + end for end in ends)
            is_fork = False
        else:
            prompt = await self._prompts.of(request)
            turn.parent, turn.shared_tokens = episode.history.nearest(prompt.tokens)
            turn.context = prompt.tokens[turn.shared_tokens * TOKEN_BYTES :]
            first, ends = 0, prompt.message_ends
            is_fork = bool(episode.history.completions)
        turn.context_tokens = turn.shared_tokens + len(turn.context) // TOKEN_BYTES
        turn.sampling = used_sampling(
            episode.opened.sampling,
            max_tokens=request.max_tokens,
            stop=request.stop,
            stop_token_ids=self._rendering.stop_token_ids,
            context_tokens=turn.context_tokens,
            context_tokens_max=self._context_tokens_max,
        )
        turn.part = _part(turn, planned, first=first, ends=ends, is_fork=is_fork)
        if request.tools_digest:
            episode.tools.setdefault(request.tools_digest, request.tools)

    async def _extension(self, planned: Plan, *, episode: Episode) -> Rendered | None:
        match = planned.match
        if match is None:
            return None
        completion = match.completion
        added = planned.request.messages[match.consumed :]
        messages = [rendering_message(message) for message in added]
        tools = episode.tools.get(completion.tools_digest, ())
        context = unpack_ids(context_tail(completion))

        def extend() -> Rendered | None:
            return self._rendering.extend(
                context, unpack_ids(completion.output), messages, tools=tools
            )

        try:
            if characters(added) <= INLINE_CHARACTERS_MAX:
                return extend()
            return await asyncio.to_thread(extend)
        except ValueError as error:
            raise invalid(str(error), param="messages") from error

    def parse(
        self, output: bytes, request_id: str, tools: Sequence[Mapping[str, Any]], context: bytes
    ) -> Reply:
        """What the policy said; implements `registry.Parse`."""
        parsed = self._rendering.parse(
            unpack_ids(output),
            completion_id=request_id,
            tools=tools,
            context=unpack_ids(context),
        )
        return Reply(
            content=parsed.content,
            reasoning=parsed.reasoning,
            calls=tuple(
                ReplyCall(id=call.id, name=call.name, arguments=call.arguments)
                for call in parsed.tool_calls
            ),
            malformed=parsed.malformed,
        )

    def answer(self, completion: Completion, *, model: str, with_logprobs: bool) -> Answer:
        """The completion as a client gets it."""
        return Answer(
            request_id=completion.request_id,
            created_s=completion.finished_ms // 1000,
            model=model,
            reply=completion.reply,
            finish_reason=finish_reason(completion.reply, sampled=completion.sampled_end),
            context_tokens=completion.context_tokens,
            output_tokens=completion.output_tokens,
            cached_tokens=completion.cached_tokens,
            logprobs=self._logprobs(completion) if with_logprobs else None,
        )

    def _logprobs(self, completion: Completion) -> tuple[TokenLogprob, ...]:
        tokens = unpack_ids(completion.output)
        return tuple(
            TokenLogprob(token=self._rendering.decode([token]), logprob=logprob)
            for token, logprob in zip(tokens, unpack_floats(completion.logprobs), strict=False)
        )


def context_tail(completion: Completion) -> bytes:
    """The last tokens of the context that the completion was sampled from."""
    count = completion.context_tokens
    return tokens_of(completion, count=count, skip=count - TAIL_TOKENS)


def _part(
    turn: Turn, planned: Plan, *, first: int, ends: tuple[int, ...], is_fork: bool
) -> TurnPart:
    """What rebuilds this turn's place in the episode, as a delta to its parent."""
    request = planned.request
    known_tools = turn.parent is not None and turn.parent.tools_digest == request.tools_digest
    return TurnPart(
        sequence=turn.sequence,
        protocol="chat_completions",
        body_digest=turn.body_digest,
        ordinal=turn.ordinal,
        is_fork=is_fork,
        tools_digest=request.tools_digest,
        tools=b"" if known_tools else request.tools_json,
        messages=msgspec.json.encode(request.messages[first:]),
        message_digests=planned.keys[first:],
        message_ends=ends,
        asked=request.asked,
    )
