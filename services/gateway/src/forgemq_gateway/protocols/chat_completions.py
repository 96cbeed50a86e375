"""OpenAI chat completions: writes answers whole and as streams; `chat_body.py` reads requests."""

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from forgemq_gateway.core.conversation import Conversation
from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.core.replies import Answer, Reply, TokenLogprob
from forgemq_gateway.core.requests import Call, Request, Text, Thinking
from forgemq_gateway.protocols.chat_body import request_of
from forgemq_gateway.wire import refusal_body

# Clients compare it with nothing; a constant gives the same completion the same bytes.
_SYSTEM_FINGERPRINT = "forgemq"


class ChatCompletions:
    """POST /v1/chat/completions; implements `wire_protocol.WireProtocol`."""

    path = "/v1/chat/completions"

    def read(self, body: bytes, _known: Conversation, /) -> Request:
        """The request in this body.

        Raises:
            RefusedError: 400, naming the field.
        """
        return request_of(body)

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The answer as one JSON object."""
        choice = {
            "index": 0,
            "message": _reply_message(answer.reply),
            "logprobs": _logprobs(answer.logprobs),
            "finish_reason": answer.finish_reason,
        }
        head = _answer_head(answer, "chat.completion")
        return {**head, "choices": [choice], "usage": _usage(answer)}

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
        return b": waiting\n\n" + _event(_chunk(head, {}, finish=None))

    def finish(self, answer: Answer) -> bytes:
        """The answer as chunks, to the end of the stream."""
        chunks = _chunks(answer, includes_usage=self._includes_usage)
        return b"".join(_event(chunk) for chunk in chunks) + b"data: [DONE]\n\n"

    def fail(self, error: RefusedError) -> bytes:
        """The refusal as the last event."""
        return _event(refusal_body(error))


def _chunks(answer: Answer, *, includes_usage: bool) -> list[dict[str, Any]]:
    """The answer as a stream: role, the parts in order, finish, and usage if asked."""
    head = _answer_head(answer, "chat.completion.chunk")
    deltas = [{"role": "assistant", "content": ""}, *_deltas(answer.reply)]
    chunks = [_chunk(head, delta, finish=None) for delta in deltas]
    if answer.logprobs is not None:
        chunks[-1]["choices"][0]["logprobs"] = _logprobs(answer.logprobs)
    chunks.append(_chunk(head, {}, finish=answer.finish_reason))
    if includes_usage:
        chunks.append({**head, "choices": [], "usage": _usage(answer)})
    return chunks


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


def _chunk(head: dict[str, Any], delta: dict[str, Any], *, finish: str | None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return {**head, "choices": [choice]}


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


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.context_tokens,
        "completion_tokens": answer.output_tokens,
        "total_tokens": answer.context_tokens + answer.output_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def _logprobs(tokens: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    if tokens is None:
        return None
    return {
        "content": [
            {
                "token": token.token,
                "logprob": token.logprob,
                "bytes": list(token.token.encode("utf-8", "replace")),
                "top_logprobs": [],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"
