"""Anthropic's messages: writes answers whole and as streams; `messages_body.py` reads requests."""

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from forgemq_gateway.core.conversation import Conversation
from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.core.replies import Answer
from forgemq_gateway.core.requests import Call, ProtocolName, ReadItems, Request, Text, Thinking
from forgemq_gateway.protocols.messages_body import request_of
from forgemq_gateway.protocols.signature import signature_of

# Anthropic's names of what our refusals mean; any other is its `invalid_request_error`.
_TYPE_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class Messages:
    """POST /v1/messages; implements `wire_protocol.WireProtocol`."""

    path = "/v1/messages"
    name: ProtocolName = "messages"

    def read(
        self, body: bytes, _conversation: Conversation, known: ReadItems | None = None, /
    ) -> Request:
        """The request in this body.

        Raises:
            RefusedError: 400, naming the field.
        """
        return request_of(body, known)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The answer as one JSON object; this protocol has one choice."""
        (answer,) = answers
        return {
            **_head(answer),
            "content": [_block(part, answer) for part in answer.reply.parts],
            **_stop(answer),
            "usage": _usage(answer, output_tokens=answer.output_tokens),
        }

    def stream(self, _request: Request) -> "MessageStream":
        """The stream that answers this request."""
        return MessageStream()

    def error(self, error: RefusedError) -> dict[str, Any]:
        """The refusal as one JSON object."""
        return _refusal(error)


class MessageStream:
    """An answer as events; implements `wire_protocol.WireStream`."""

    def keep_alive(self, **_about: object) -> bytes:
        """The event by which clients see that the stream lives."""
        return _event({"type": "ping"})

    def finish(self, answers: Sequence[Answer]) -> bytes:
        """The answer as events, to the end of the stream."""
        (answer,) = answers
        return b"".join(_event(event) for event in _events(answer))

    def fail(self, error: RefusedError) -> bytes:
        """The refusal as the last event."""
        return _event(_refusal(error))


class CountTokens:
    """POST /v1/messages/count_tokens; implements `wire_protocol.TokenCounter`."""

    path = "/v1/messages/count_tokens"
    name: ProtocolName = "messages"

    def read(
        self, body: bytes, _conversation: Conversation, known: ReadItems | None = None, /
    ) -> Request:
        """The request in this body; as `Messages.read`."""
        return request_of(body, known)

    def counted(self, tokens: int) -> dict[str, Any]:
        """The number of context tokens as one JSON object."""
        return {"input_tokens": tokens}

    def error(self, error: RefusedError) -> dict[str, Any]:
        """The refusal as one JSON object."""
        return _refusal(error)


def _refusal(error: RefusedError) -> dict[str, Any]:
    fallback = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _TYPE_OF_STATUS.get(error.status, fallback)
    return {"type": "error", "error": {"type": kind, "message": _message(error)}}


def _message(error: RefusedError) -> str:
    """What is wrong; agents look for these words before they shorten their history."""
    over = error.overflow
    if over is not None:
        return f"prompt is too long: {over.tokens} tokens > {over.tokens_max} maximum"
    if error.is_context_full:
        return f"prompt is too long: {error.message}"
    return f"{error.param}: {error.message}" if error.param else error.message


def _events(answer: Answer) -> Iterator[dict[str, Any]]:
    start = {
        **_head(answer),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(answer, output_tokens=0),
    }
    yield {"type": "message_start", "message": start}
    for index, part in enumerate(answer.reply.parts):
        yield {"type": "content_block_start", "index": index, "content_block": _empty(part)}
        for delta in _deltas(part, answer):
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    usage = _usage(answer, output_tokens=answer.output_tokens)
    yield {"type": "message_delta", "delta": _stop(answer), "usage": usage}
    yield {"type": "message_stop"}


def _head(answer: Answer) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.request_id}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
    }


def _block(part: Text | Thinking | Call, answer: Answer) -> dict[str, Any]:
    match part:
        case Thinking(text):
            return {
                "type": "thinking",
                "thinking": text,
                "signature": signature_of(answer.request_id),
            }
        case Text(text):
            return {"type": "text", "text": text}
        case Call():
            # The JSON that the model wrote: numbers keep every digit.
            arguments = orjson.Fragment(part.arguments)
            return {"type": "tool_use", "id": part.id, "name": part.name, "input": arguments}


def _empty(part: Text | Thinking | Call) -> dict[str, Any]:
    match part:
        case Thinking():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case Text():
            return {"type": "text", "text": ""}
        case Call():
            return {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}


def _deltas(part: Text | Thinking | Call, answer: Answer) -> Iterator[dict[str, Any]]:
    match part:
        case Thinking(text):
            yield {"type": "thinking_delta", "thinking": text}
            yield {"type": "signature_delta", "signature": signature_of(answer.request_id)}
        case Text(text):
            yield {"type": "text_delta", "text": text}
        case Call():
            yield {"type": "input_json_delta", "partial_json": part.arguments}


def _stop(answer: Answer) -> dict[str, Any]:
    if answer.stop_string:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_string}
    reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    return {"stop_reason": reason[answer.finish_reason], "stop_sequence": None}


def _usage(answer: Answer, *, output_tokens: int) -> dict[str, Any]:
    """Token counts; Anthropic's `input_tokens` are those that no cache had."""
    cached = min(answer.cached_tokens, answer.context_tokens)
    return {
        "input_tokens": answer.context_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output_tokens,
    }


def _event(event: dict[str, Any]) -> bytes:
    return b"event: " + str(event["type"]).encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"
