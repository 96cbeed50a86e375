"""The assistant's turn as the client gets it, in OpenAI's shapes."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from forgemq_gateway.core.digests import message_digest

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]

# Clients compare it with nothing; a constant keeps the same completion the same bytes.
_SYSTEM_FINGERPRINT = "forgemq"


class ReplyCall(Struct, frozen=True, kw_only=True):
    """One tool call of a reply."""

    id: str
    name: str
    arguments: str


class Reply(Struct, frozen=True, kw_only=True):
    """What the policy said, parsed."""

    content: str
    reasoning: str = ""
    calls: tuple[ReplyCall, ...] = ()
    malformed: int = 0


class TokenLogprob(Struct, frozen=True, kw_only=True):
    """One sampled token as clients read it."""

    token: str
    logprob: float


class Answer(Struct, frozen=True, kw_only=True):
    """One completion, ready to be written in either shape."""

    request_id: str
    created_s: int
    model: str
    reply: Reply
    finish_reason: FinishReason
    context_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None


def echo_key(reply: Reply, *, request_id: str) -> str:
    """Match key of this turn in a later history: its tool calls' ids if any, else its text."""
    if reply.calls:
        return f"turn:{request_id}"
    return message_digest("assistant", reply.content)


def finish_reason(reply: Reply, *, sampled: str) -> FinishReason:
    """`tool_calls` where there are any, unless the turn was cut."""
    if sampled == "length":
        return "length"
    return "tool_calls" if reply.calls else "stop"


def chat_completion(answer: Answer) -> dict[str, Any]:
    """The whole answer as one object."""
    return {
        **_head(answer, "chat.completion"),
        "choices": [
            {
                "index": 0,
                "message": _message(answer.reply),
                "logprobs": _logprobs(answer.logprobs),
                "finish_reason": answer.finish_reason,
            }
        ],
        "usage": _usage(answer),
    }


def chat_chunks(answer: Answer, *, includes_usage: bool) -> list[dict[str, Any]]:
    """The answer as a stream: role, reasoning, text, calls, finish, and usage where asked."""
    head = _head(answer, "chat.completion.chunk")
    reply = answer.reply
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if reply.reasoning:
        deltas.append({"reasoning_content": reply.reasoning})
    if reply.content:
        deltas.append({"content": reply.content})
    deltas += [
        {"tool_calls": [{"index": index, **_call(call)}]} for index, call in enumerate(reply.calls)
    ]
    chunks = [_chunk(head, delta, finish=None) for delta in deltas]
    if answer.logprobs is not None:
        chunks[-1]["choices"][0]["logprobs"] = _logprobs(answer.logprobs)
    chunks.append(_chunk(head, {}, finish=answer.finish_reason))
    if includes_usage:
        chunks.append({**head, "choices": [], "usage": _usage(answer)})
    return chunks


def waiting_chunk(*, request_id: str, created_s: int, model: str) -> dict[str, Any]:
    """A chunk that says nothing: some clients count only decoded events as a sign of life."""
    head = {
        "id": f"chatcmpl-{request_id}",
        "object": "chat.completion.chunk",
        "created": created_s,
        "model": model,
    }
    return _chunk(head, {}, finish=None)


def error_body(
    message: str, *, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answer.request_id}",
        "object": kind,
        "created": answer.created_s,
        "model": answer.model,
        "system_fingerprint": _SYSTEM_FINGERPRINT,
    }


def _chunk(head: dict[str, Any], delta: dict[str, Any], *, finish: str | None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return {**head, "choices": [choice]}


def _message(reply: Reply) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        # OpenAI says null beside tool calls without text; clients rely on it.
        "content": reply.content if reply.content or not reply.calls else None,
        "refusal": None,
    }
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [_call(call) for call in reply.calls]
    return message


def _call(call: ReplyCall) -> dict[str, Any]:
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
