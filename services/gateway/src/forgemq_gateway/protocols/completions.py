"""OpenAI completions: writes answers whole and as streams; `completions_body.py` reads requests."""

import codecs
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from forgemq_gateway.core.conversation import Conversation
from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.core.replies import Answer, TokenLogprob, matched_stop
from forgemq_gateway.core.requests import ProtocolName, ReadItems, Request
from forgemq_gateway.protocols.choice_parts import choice_head, usage_of
from forgemq_gateway.protocols.completions_body import request_of
from forgemq_gateway.wire import refusal_body


class Completions:
    """POST /v1/completions; implements `wire_protocol.WireProtocol`."""

    path = "/v1/completions"
    name: ProtocolName = "completions"

    def read(
        self, body: bytes, _conversation: Conversation, _known: ReadItems | None = None, /
    ) -> Request:
        """The request in this body.

        Raises:
            RefusedError: 400, naming the field.
        """
        return request_of(body)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The answers as the choices of one JSON object."""
        choices = [_choice(answer, index, answers) for index, answer in enumerate(answers)]
        return {**_answer_head(answers[0]), "choices": choices, "usage": usage_of(answers)}

    def stream(self, request: Request) -> "CompletionStream":
        """The stream that answers this request."""
        return CompletionStream(includes_usage=request.includes_usage)

    def error(self, error: RefusedError) -> dict[str, Any]:
        """The refusal as one JSON object."""
        return refusal_body(error, messages="prompt")


class CompletionStream:
    """An answer as chunks; implements `wire_protocol.WireStream`."""

    def __init__(self, *, includes_usage: bool) -> None:
        self._includes_usage = includes_usage
        self._written = 0
        """Characters of the first choice."""

    def keep_alive(self, *, request_id: str, created_s: int, model: str) -> bytes:
        """A comment for proxies, and an empty chunk for clients that count only events."""
        head = _head(request_id, created_s=created_s, model=model)
        empty = {"index": 0, "text": "", "logprobs": None, "finish_reason": None}
        return b": waiting\n\n" + _event({**head, "choices": [empty]})

    def more(self, answer: Answer) -> bytes:
        """What the one choice has beyond what was written, as a chunk."""
        text = answer.reply.text
        added, self._written = text[self._written :], len(text)
        choice = {"index": 0, "text": added, "logprobs": None, "finish_reason": None}
        return _event({**_answer_head(answer), "choices": [choice]})

    def finish(self, answers: Sequence[Answer]) -> bytes:
        """What is not written of the answer, a chunk for each choice, to the stream's end."""
        head = _answer_head(answers[0])
        choices = [_choice(answer, index, answers) for index, answer in enumerate(answers)]
        choices[0]["text"] = choices[0]["text"][self._written :]
        chunks: list[dict[str, Any]] = [{**head, "choices": [choice]} for choice in choices]
        if self._includes_usage:
            chunks.append({**head, "choices": [], "usage": usage_of(answers)})
        return b"".join(_event(chunk) for chunk in chunks) + b"data: [DONE]\n\n"

    def fail(self, error: RefusedError) -> bytes:
        """The refusal as the last event."""
        return _event(refusal_body(error, messages="prompt"))


def _choice(answer: Answer, index: int, answers: Sequence[Answer]) -> dict[str, Any]:
    choice = {
        **choice_head(answer, index, answers),
        "text": answer.reply.text,
        "logprobs": _logprobs(answer.logprobs),
        "finish_reason": answer.finish_reason,
        "matched_stop": matched_stop(answer),
    }
    if answer.output_ids is None:
        return choice
    return {**choice, "prompt_token_ids": answer.context_ids, "token_ids": answer.output_ids}


def _answer_head(answer: Answer) -> dict[str, Any]:
    return _head(answer.request_id, created_s=answer.created_s, model=answer.model)


def _head(request_id: str, *, created_s: int, model: str) -> dict[str, Any]:
    return {
        "id": f"cmpl-{request_id}",
        "object": "text_completion",
        "created": created_s,
        "model": model,
    }


def _logprobs(tokens: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    """Columns, one value for each sampled token; offsets count from the start of the text."""
    if tokens is None:
        return None
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_likely(token) for token in tokens],
        "text_offset": list(_offsets(tokens)),
    }


def _offsets(tokens: Sequence[TokenLogprob]) -> Iterator[int]:
    """Where each token begins in the text; a part of a character, where the character does."""
    characters = codecs.getincrementaldecoder("utf-8")("replace")
    offset = 0
    for token in tokens:
        yield offset
        known = token.data
        offset += len(token.token if known is None else characters.decode(known))


def _likely(token: TokenLogprob) -> dict[str, float]:
    """The most likely tokens, and the sampled one."""
    return {likely.token: likely.logprob for likely in (*token.top, token)}


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"
