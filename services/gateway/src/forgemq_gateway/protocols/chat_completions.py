"""OpenAI chat completions: writes answers whole and as streams; `chat_body.py` reads requests."""

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from forgemq_gateway.core.conversation import Conversation
from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.core.replies import Answer, Reply, TokenLogprob, matched_stop
from forgemq_gateway.core.requests import Call, ProtocolName, ReadItems, Request, Text, Thinking
from forgemq_gateway.protocols.chat_body import request_of
from forgemq_gateway.protocols.choice_parts import choice_head, usage_of
from forgemq_gateway.protocols.logprobs import entries
from forgemq_gateway.wire import refusal_body

# Clients compare it with nothing; a constant gives the same completion the same bytes.
_SYSTEM_FINGERPRINT = "forgemq"


class ChatCompletions:
    """POST /v1/chat/completions; implements `wire_protocol.WireProtocol`."""

    path = "/v1/chat/completions"
    name: ProtocolName = "chat_completions"

    def read(
        self, body: bytes, _conversation: Conversation, known: ReadItems | None = None, /
    ) -> Request:
        """The request in this body.

        Raises:
            RefusedError: 400, naming the field.
        """
        return request_of(body, known)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The answers as the choices of one JSON object."""
        choices = [
            {
                **choice_head(answer, index, answers),
                "message": _reply_message(answer.reply),
                "logprobs": _logprobs(answer.logprobs),
                "finish_reason": answer.finish_reason,
                "matched_stop": matched_stop(answer),
            }
            for index, answer in enumerate(answers)
        ]
        head = _answer_head(answers[0], "chat.completion")
        return {**head, "choices": choices, "usage": usage_of(answers)}

    def stream(self, request: Request) -> "ChatStream":
        """The stream that answers this request."""
        return ChatStream(includes_usage=request.includes_usage)

    def error(self, error: RefusedError) -> dict[str, Any]:
        """The refusal as one JSON object."""
        return refusal_body(error)


class ChatStream:
    """An answer as chunks; implements `wire_protocol.WireStream`."""

    def __init__(self, *, includes_usage: bool) -> None:
        self._includes_usage = includes_usage

    def keep_alive(self, *, request_id: str, created_s: int, model: str) -> bytes:
        """A comment for proxies, and an empty chunk for clients that count only events."""
        head = _head(request_id, "chat.completion.chunk", created_s=created_s, model=model)
        return b": waiting\n\n" + _event({**head, "choices": [_choice({"index": 0}, {})]})

    def finish(self, answers: Sequence[Answer]) -> bytes:
        """The answer as chunks, choice by choice, to the end of the stream."""
        head = _answer_head(answers[0], "chat.completion.chunk")
        chunks = [
            {**head, "choices": [choice]}
            for index, answer in enumerate(answers)
            for choice in _choices(answer, choice_head(answer, index, answers))
        ]
        if self._includes_usage:
            chunks.append({**head, "choices": [], "usage": usage_of(answers)})
        return b"".join(_event(chunk) for chunk in chunks) + b"data: [DONE]\n\n"

    def fail(self, error: RefusedError) -> bytes:
        """The refusal as the last event."""
        return _event(refusal_body(error))


def _choices(answer: Answer, head: dict[str, Any]) -> list[dict[str, Any]]:
    """One choice as chunks: role, the parts in order, finish."""
    deltas = [{"role": "assistant", "content": ""}, *_deltas(answer.reply)]
    choices = [_choice(head, delta) for delta in deltas]
    if answer.logprobs is not None:
        choices[-1]["logprobs"] = _logprobs(answer.logprobs)
    end = _choice(head, {}, finish=answer.finish_reason)
    return [*choices, {**end, "matched_stop": matched_stop(answer)}]


def _deltas(reply: Reply) -> Iterator[dict[str, Any]]:
    call_index = 0
    for part in reply.parts:
        match part:
            case Thinking(text):
                yield {"reasoning_content": text}
            case Text(text):
                yield {"content": text}
            case Call():
                yield {"tool_calls": [{"index": call_index, **_call(part)}]}
                call_index += 1


def _answer_head(answer: Answer, kind: str) -> dict[str, Any]:
    head = _head(answer.request_id, kind, created_s=answer.created_s, model=answer.model)
    return {**head, "system_fingerprint": _SYSTEM_FINGERPRINT}


def _head(request_id: str, kind: str, *, created_s: int, model: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{request_id}",
        "object": kind,
        "created": created_s,
        "model": model,
    }


def _choice(
    head: dict[str, Any], delta: dict[str, Any], *, finish: str | None = None
) -> dict[str, Any]:
    return {**head, "delta": delta, "logprobs": None, "finish_reason": finish}


def _reply_message(reply: Reply) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        # OpenAI says null beside tool calls without text; clients rely on it.
        "content": reply.text if reply.text or not reply.calls else None,
        "refusal": None,
    }
    if reply.thinking:
        message["reasoning_content"] = reply.thinking
    if reply.calls:
        message["tool_calls"] = [_call(call) for call in reply.calls]
    return message


def _call(call: Call) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _logprobs(tokens: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    return None if tokens is None else {"content": entries(tokens), "refusal": None}


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"
