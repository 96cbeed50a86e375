"""From a client's messages to the tokens of a turn, and from sampled tokens to a reply."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from forgemq_contracts.arrays import unpack_floats, unpack_ids, view_ids
from forgemq_contracts.completions import (
    CONSTRAINT_CHARACTERS_MAX,
    Constraint,
    TopTokens,
    TurnPart,
)
from forgemq_contracts.episodes import HistoryPolicy, Sampling
from forgemq_gateway.core.completion_tokens import tokens_of
from forgemq_gateway.core.episodes import HeldEpisode
from forgemq_gateway.core.errors import invalid
from forgemq_gateway.core.known_completion import TOKEN_BYTES, KnownCompletion
from forgemq_gateway.core.placed import Placed, place_rendered
from forgemq_gateway.core.plans import Plan, Prepared, plan
from forgemq_gateway.core.reading import context_tail, tools_of
from forgemq_gateway.core.replies import Answer, Reply, TokenLogprob, finish_reason
from forgemq_gateway.core.requests import (
    Call,
    Request,
    RequestMessage,
    Text,
    Thinking,
    chat_form,
    chat_json,
    work_size,
)
from forgemq_gateway.core.sampling import reading_sampling, used_sampling
from forgemq_gateway.core.settled import is_live, settled
from forgemq_gateway.core.turns import OpenTurn
from forgemq_gateway.large_work import LargeWork
from forgemq_gateway.prompts import Prompts, check_fits
from forgemq_gateway.raw_prompts import RawPrompts
from forgemq_rendering import Rendered, Rendering


class Composer:
    """Makes requests into tokens, and reads replies.

    Args:
        renderings: By the policy of an episode that writes its earlier turns so; at least one.
        context_tokens_max: Context and output together.
    """

    def __init__(
        self, renderings: Mapping[HistoryPolicy, Rendering], *, context_tokens_max: int
    ) -> None:
        self._renderings = renderings
        # Replies, stops and grammars are the same under every policy.
        self._rendering = next(iter(renderings.values()))
        self._work = LargeWork("render")
        self._prompts = {
            policy: Prompts(rendering, work=self._work, context_tokens_max=context_tokens_max)
            for policy, rendering in renderings.items()
        }
        self._raw = RawPrompts(
            self._rendering, work=self._work, context_tokens_max=context_tokens_max
        )
        self._context_tokens_max = context_tokens_max

    async def prepare(self, turn: OpenTurn, *, planned: Plan, episode: HeldEpisode) -> Prepared:
        """The tokens, parent and sampling of this turn.

        Raises:
            RefusedError: 400: the template refuses the messages or the context is too long.
        """
        request = planned.request
        placed = await self._placed(planned, episode=episode)
        given = await self._given(request)
        sampling = self._sampling(request, placed, episode=episode, given=given)
        messages_json = await self._json(request.messages[placed.first_message :])
        if request.tools_digest:
            episode.note_tools(request.tools_digest, request.tools, len(request.tools_json))
        parent = placed.parent
        knows_tools = parent is not None and parent.tools_digest == request.tools_digest
        return Prepared(
            parent=parent,
            shared_tokens=placed.shared_tokens,
            context=placed.context,
            context_tokens=placed.context_tokens,
            sampling=sampling,
            constraint=self._constraint(request, placed),
            top_tokens=request.top_tokens,
            is_live=not given and self._is_live(request, episode),
            given=given,
            part=TurnPart(
                sequence=turn.sequence,
                protocol=request.protocol,
                body_digest=turn.body_digest,
                ordinal=turn.ordinal,
                is_fork=placed.fork_reason is not None and not placed.extends,
                fork_reason=placed.fork_reason,
                tools_digest=request.tools_digest,
                tools=b"" if knows_tools else request.tools_json,
                messages=messages_json,
                message_digests=planned.keys[placed.first_message :],
                message_ends=placed.message_ends,
                asked=request.asked,
                after_offset=turn.after_offset,
                cuts=request.cuts,
            ),
        )

    def _sampling(
        self, request: Request, placed: Placed, *, episode: HeldEpisode, given: bytes
    ) -> Sampling:
        context_tokens_max = episode.opened.context_tokens_max or self._context_tokens_max
        if given:
            return reading_sampling(
                given_tokens=len(given) // TOKEN_BYTES,
                context_tokens=placed.context_tokens,
                context_tokens_max=context_tokens_max,
            )
        return used_sampling(
            episode.opened.sampling,
            max_tokens=request.max_tokens,
            stop=request.stop,
            stop_token_ids=self._stops(request),
            context_tokens=placed.context_tokens,
            context_tokens_max=context_tokens_max,
        )

    async def _given(self, request: Request) -> bytes:
        """Tokens of the reply that the request brings; b"" if it asks for one."""
        reply = request.reply
        if reply is None:
            return b""
        rendering, messages = self._rendering, [chat_form(each) for each in request.messages]
        try:
            return await self._work.run(
                lambda: rendering.reply_tokens(messages, chat_form(reply), tools=request.tools),
                size=work_size((*request.messages, reply)),
            )
        except ValueError as error:
            raise invalid(str(error), param="forgemq_reply") from error

    async def _placed(self, planned: Plan, *, episode: HeldEpisode) -> Placed:
        """The tokens of a plan, in a chat template unless it has a prompt of its own."""
        if planned.request.prompts:
            return await self._raw.place(planned, history=episode.history)
        extension = await self._extension(planned, episode=episode)
        if planned.match is not None and extension is not None:
            parent = planned.match.completion
            shared = parent.total_tokens
            return Placed(
                parent=parent,
                shared_tokens=shared,
                context=extension.tokens,
                fork_reason=planned.fork_reason,
                extends=True,
                first_message=planned.match.consumed,
                message_ends=tuple(shared + end for end in extension.message_ends),
            )
        prompt = await self._prompts[episode.opened.history].of(planned.request)
        return place_rendered(
            prompt.tokens, prompt.message_ends, planned=planned, history=episode.history
        )

    async def count_tokens(self, request: Request, *, episode: HeldEpisode) -> int:
        """Context tokens that this request would have now.

        Raises:
            RefusedError: as `prepare`.
        """
        planned = plan(request, history=episode.history)
        extension = await self._extension(planned, episode=episode)
        if planned.match is not None and extension is not None:
            shared = planned.match.completion.total_tokens
            return shared + len(extension.tokens) // TOKEN_BYTES
        prompt = await self._prompts[episode.opened.history].of(request)
        return len(prompt.tokens) // TOKEN_BYTES

    async def _json(self, messages: Sequence[RequestMessage]) -> bytes:
        return await self._work.run(lambda: chat_json(messages), size=work_size(messages))

    def _stops(self, request: Request) -> tuple[int, ...]:
        """Tokens that end the output; a call's end too if there may be one call only.

        To stop there truncates no distribution, so that these tokens train as all others.
        """
        if not request.is_one_call:
            return self._rendering.stop_token_ids
        call_end_id = self._rendering.grammar.call_end_id
        if call_end_id is None:
            raise invalid(
                "calls of this model cannot be limited to one: leave parallel_tool_calls out",
                param="parallel_tool_calls",
            )
        return (*self._rendering.stop_token_ids, call_end_id)

    def _constraint(self, request: Request, placed: Placed) -> Constraint | None:
        """The grammar of the form that the client demands, behind the tokens of its request."""
        form = request.form
        if form is None:
            return None
        tools = [tool for tool in request.tools if tool["function"]["name"] in form.functions]
        try:
            text = self._rendering.grammar.structural_tag(
                answer=form.answer,
                tools=tools,
                is_one_call=request.is_one_call,
                context=unpack_ids(placed.tail()),
            )
        except ValueError as error:
            raise invalid(f"{form.param}: {error}", param=form.param) from error
        if len(text) > CONSTRAINT_CHARACTERS_MAX:
            raise invalid(
                f"the schemas must have at most {CONSTRAINT_CHARACTERS_MAX} characters together",
                param=form.param,
            )
        return Constraint(structural_tag=text)

    async def _extension(self, planned: Plan, *, episode: HeldEpisode) -> Rendered | None:
        """What follows the matched completion; None if the whole history must be rendered."""
        match = planned.match
        if match is None:
            return None
        completion = match.completion
        added = planned.request.messages[match.consumed :]
        tools = episode.tools.get(completion.tools_digest, ())
        context = view_ids(episode.history.context_tail(completion))
        rendering = self._renderings[episode.opened.history]

        def extend() -> Rendered | None:
            check_fits(added, rendering=rendering, context_tokens_max=self._context_tokens_max)
            messages = [chat_form(message) for message in added]
            return rendering.extend(context, unpack_ids(completion.output), messages, tools=tools)

        try:
            return await self._work.run(extend, size=work_size(added))
        except ValueError as error:
            raise invalid(str(error), param="messages") from error

    def parse(
        self,
        output: bytes,
        request_id: str,
        tools: Sequence[Mapping[str, Any]] | None,
        context: bytes,
    ) -> Reply:
        """What the model said, stop strings included; implements `registry.Parse`."""
        return self._reply(unpack_ids(output), request_id, tools, view_ids(context))

    def _reply(
        self,
        output: Sequence[int],
        request_id: str,
        tools: Sequence[Mapping[str, Any]] | None,
        context: Sequence[int],
    ) -> Reply:
        parsed = self._rendering.parse(
            output, completion_id=request_id, tools=tools, context=context
        )
        # The renderers read a reply in this order: reasoning, text, calls.
        parts: list[Text | Thinking | Call] = []
        if parsed.reasoning:
            parts.append(Thinking(parsed.reasoning))
        if parsed.content:
            parts.append(Text(parsed.content))
        parts += [Call(call.id, call.name, call.arguments) for call in parsed.tool_calls]
        return Reply(parts=tuple(parts), malformed=parsed.malformed)

    def _is_live(self, request: Request, episode: HeldEpisode) -> bool:
        """Whether a client reads along, and the beginning of its reply can be read."""
        can_read = bool(request.prompts or self._rendering.continuations.parsed)
        return can_read and is_live(request, episode.opened)

    async def settled(self, output: bytes, *, turn: OpenTurn, episode: HeldEpisode) -> Reply:
        """What the reply of a turn surely begins with, after these tokens of it."""
        prepared = turn.prepared
        if prepared is None:
            return Reply()
        tools = tools_of(episode, prepared.part)
        context = context_tail(
            episode,
            prepared.context,
            parent=prepared.parent,
            shared_tokens=prepared.shared_tokens,
        )
        stops = prepared.sampling.stop

        def read() -> Reply:
            return self.begun(output, turn.request_id, tools, context, stops=stops)

        tails = len(self._rendering.continuations.parsed)
        return await self._work.run(read, size=len(output) * tails)

    def begun(
        self,
        output: bytes,
        request_id: str,
        tools: Sequence[Mapping[str, Any]] | None,
        context: bytes,
        *,
        stops: Sequence[str],
    ) -> Reply:
        """What `parse` gives of every output that begins with this one, up to its stop string."""
        tails = self._rendering.continuations
        ids = unpack_ids(output)
        if tools is not None and tuple(ids[: len(tails.head)]) == tails.head[: len(ids)]:
            return Reply()
        if tools and tails.call_id in ids:
            ids = ids[: ids.index(tails.call_id)]
        before = unpack_ids(context)
        replies = [
            self._reply([*ids, *tail], request_id, tools, before)
            for tail in (tails.plain if tools is None else tails.parsed)
        ]
        marks = () if tools is None else tails.written_marks
        return settled(replies, stops=stops, marks=marks) if replies else Reply()

    def answers(
        self, completions: Sequence[KnownCompletion], *, request: Request
    ) -> tuple[Answer, ...]:
        """The completions of a request's choices as a protocol writes them."""
        return tuple(
            self._answer(completion, request=request, sample=index % request.n)
            for index, completion in enumerate(completions)
        )

    def _answer(self, completion: KnownCompletion, *, request: Request, sample: int) -> Answer:
        return Answer(
            request_id=completion.request_id,
            sample=sample,
            created_s=completion.finished_ms // 1000,
            model=request.model,
            reply=completion.reply,
            finish_reason=finish_reason(completion.reply, sampled=completion.sampled_end),
            context_tokens=completion.context_tokens,
            output_tokens=completion.output_tokens,
            cached_tokens=completion.cached_tokens,
            stop_string=completion.stop_string,
            stop_token_id=_stop_token_id(completion),
            context_ids=_ids(tokens_of(completion, count=completion.context_tokens))
            if request.returns_ids
            else None,
            output_ids=_ids(completion.output) if request.returns_ids else None,
            logprobs=self._logprobs(completion) if request.wants_logprobs else None,
        )

    def _logprobs(self, completion: KnownCompletion) -> tuple[TokenLogprob, ...]:
        tokens = unpack_ids(completion.output)
        logprobs = unpack_floats(completion.logprobs)
        tops = self._tops(completion.top_tokens, count=len(tokens))
        return tuple(
            self._logprob(token, logprob, top=top)
            for token, logprob, top in zip(tokens, logprobs, tops, strict=False)
        )

    def _logprob(
        self, token: int, logprob: float, *, top: tuple[TokenLogprob, ...] = ()
    ) -> TokenLogprob:
        text = self._rendering.decode([token])
        data = self._rendering.bytes_of(token, text=text)
        return TokenLogprob(token=text, data=data, logprob=logprob, top=top)

    def _tops(self, top_tokens: TopTokens | None, *, count: int) -> list[tuple[TokenLogprob, ...]]:
        """The most likely tokens beside each of `count` tokens; not those that are impossible."""
        if top_tokens is None or not count:
            return [()] * count
        ids, logprobs = unpack_ids(top_tokens.ids), unpack_floats(top_tokens.logprobs)
        pairs = list(zip(ids, logprobs, strict=True))
        number = len(pairs) // count
        return [
            tuple(
                self._logprob(token, logprob)
                for token, logprob in pairs[start : start + number]
                if logprob > -math.inf
            )
            for start in range(0, len(pairs), number)
        ]


def _stop_token_id(completion: KnownCompletion) -> int | None:
    if completion.sampled_end != "stop" or completion.stop_string or not completion.output:
        return None
    return unpack_ids(completion.output[-TOKEN_BYTES:])[0]


def _ids(tokens: bytes) -> tuple[int, ...]:
    return tuple(unpack_ids(tokens))
