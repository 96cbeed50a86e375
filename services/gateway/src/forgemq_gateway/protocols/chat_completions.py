"""OpenAI chat completions: writes answers whole and as streams; `chat_body.py` reads requests."""

from collections import defaultdict
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
from forgemq_gateway.protocols.part_cursor import PartCursor, Step
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
        self._cursors: defaultdict[int, PartCursor] = defaultdict(PartCursor)

    def keep_alive(self, *, request_id: str, created_s: int, model: str) -> bytes:
        """A comment for proxies, and an empty chunk for clients that count only events."""
        head = _head(request_id, "chat.completion.chunk", created_s=created_s, model=model)
        return b": waiting\n\n" + _event({**head, "choices": [_choice({"index": 0}, {})]})

    def more(self, answer: Answer) -> bytes:
        """What the one choice has beyond what was written, as chunks."""
        head = _answer_head(answer, "chat.completion.chunk")
        choices = self._choices(answer, {"index": 0}, is_whole=False)
        return b"".join(_event({**head, "choices": [choice]}) for choice in choices)

    def finish(self, answers: Sequence[Answer]) -> bytes:
        """What is not written of the answer as chunks, choice by choice, to the stream's end."""
        head = _answer_head(answers[0], "chat.completion.chunk")
        chunks = [
            {**head, "choices": [choice]}
            for index, answer in enumerate(answers)
            for choice in self._ended(answer, choice_head(answer, index, answers))
        ]
        if self._includes_usage:
            chunks.append({**head, "choices": [], "usage": usage_of(answers)})
        return b"".join(_event(chunk) for chunk in chunks) + b"data: [DONE]\n\n"

    def fail(self, error: RefusedError) -> bytes:
        """The refusal as the last event."""
        return _event(refusal_body(error))

    def _choices(
        self, answer: Answer, head: dict[str, Any], *, is_whole: bool
    ) -> list[dict[str, Any]]:
        """What is new of a choice: role, the parts in order."""
        cursor = self._cursors[head["index"]]
        role = [{"role": "assistant", "content": ""}] if cursor.is_at_start else []
        steps = cursor.steps(answer.reply.parts, is_whole=is_whole)
        return [_choice(head, delta) for delta in (*role, *_deltas(steps, answer.reply))]

    def _ended(self, answer: Answer, head: dict[str, Any]) -> list[dict[str, Any]]:
        """What is not written of a choice, and its finish."""
        choices = self._choices(answer, head, is_whole=True)
        if answer.logprobs is not None:
            choices[-1]["logprobs"] = _logprobs(answer.logprobs)
        end = _choice(head, {}, finish=answer.finish_reason)
        return [*choices, {**end, "matched_stop": matched_stop(answer)}]


def _deltas(steps: Iterator[Step], reply: Reply) -> Iterator[dict[str, Any]]:
    for step in steps:
        match step.part:
            case Thinking() if step.kind == "grow":
                yield {"reasoning_content": step.added}
            case Text() if step.kind == "grow":
                yield {"content": step.added}
            case Call() as call if step.kind == "begin":
                yield {"tool_calls": [{"index": reply.calls.index(call), **_call(call)}]}
            case _:
                pass


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
