"""Anthropic's messages: writes answers whole and as streams; `messages_body.py` reads requests."""

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from forgemq_gateway.core.conversation import Conversation
from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.core.replies import Answer
from forgemq_gateway.core.requests import Call, ProtocolName, ReadItems, Request, Text, Thinking
from forgemq_gateway.protocols.messages_body import request_of
from forgemq_gateway.protocols.part_cursor import PartCursor, Step
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

    def __init__(self) -> None:
        self._cursor = PartCursor()
        self._has_started = False

    def keep_alive(self, **_about: object) -> bytes:
        """The event by which clients see that the stream lives."""
        return _event({"type": "ping"})

    def more(self, answer: Answer) -> bytes:
        """What the answer has beyond what was written, as events."""
        return b"".join(_event(event) for event in self._events(answer, is_whole=False))

    def finish(self, answers: Sequence[Answer]) -> bytes:
        """What is not written of the answer as events, to the end of the stream."""
        (answer,) = answers
        events = [*self._events(answer, is_whole=True), *_end(answer)]
        return b"".join(_event(event) for event in events)

    def fail(self, error: RefusedError) -> bytes:
        """The refusal as the last event."""
        return _event(_refusal(error))

    def _events(self, answer: Answer, *, is_whole: bool) -> Iterator[dict[str, Any]]:
        if not self._has_started:
            self._has_started = True
            yield _start(answer)
        for step in self._cursor.steps(answer.reply.parts, is_whole=is_whole):
            yield from _step_events(step, answer)


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
    param = "stop_sequences" if error.param == "stop" else error.param
    return f"{param}: {error.message}" if param else error.message


def _start(answer: Answer) -> dict[str, Any]:
    message = {
        **_head(answer),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(answer, output_tokens=0),
    }
    return {"type": "message_start", "message": message}


def _step_events(step: Step, answer: Answer) -> Iterator[dict[str, Any]]:
    place: dict[str, Any] = {"index": step.place}
    match step.kind:
        case "begin":
            yield {"type": "content_block_start", **place, "content_block": _empty(step.part)}
        case "grow":
            yield {"type": "content_block_delta", **place, "delta": _delta(step)}
        case "end":
            if isinstance(step.part, Thinking):
                signed = {"type": "signature_delta", "signature": signature_of(answer.request_id)}
                yield {"type": "content_block_delta", **place, "delta": signed}
            yield {"type": "content_block_stop", **place}


def _end(answer: Answer) -> Iterator[dict[str, Any]]:
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


def _delta(step: Step) -> dict[str, Any]:
    match step.part:
        case Thinking():
            return {"type": "thinking_delta", "thinking": step.added}
        case Text():
            return {"type": "text_delta", "text": step.added}
        case Call():
            return {"type": "input_json_delta", "partial_json": step.added}


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
