"""OpenAI responses: writes answers whole and as streams; `responses_body.py` reads requests."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import orjson

from forgemq_gateway.core.conversation import Conversation
from forgemq_gateway.core.errors import RefusedError
from forgemq_gateway.core.replies import Answer
from forgemq_gateway.core.requests import Call, ProtocolName, ReadItems, Request, Text, Thinking
from forgemq_gateway.protocols.logprobs import entries
from forgemq_gateway.protocols.part_cursor import PartCursor, Step
from forgemq_gateway.protocols.response_ids import item_id, response_id
from forgemq_gateway.protocols.responses_body import request_of
from forgemq_gateway.protocols.signature import signature_of
from forgemq_gateway.wire import refusal_body


class Responses:
    """POST /v1/responses; implements `wire_protocol.WireProtocol`."""

    path = "/v1/responses"
    name: ProtocolName = "responses"

    def read(
        self, body: bytes, conversation: Conversation, known: ReadItems | None = None, /
    ) -> Request:
        """The request in this body.

        Raises:
            RefusedError: 400, naming the field; 404, an id that it refers to is not known.
        """
        return request_of(body, conversation, known)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The answer as one JSON object; this protocol has one choice."""
        (answer,) = answers
        return _response(answer)

    def stream(self, _request: Request) -> "ResponseStream":
        """The stream that answers this request."""
        return ResponseStream()

    def error(self, error: RefusedError) -> dict[str, Any]:
        """The refusal as one JSON object."""
        return refusal_body(error, messages="input")


class CountInputTokens:
    """POST /v1/responses/input_tokens; implements `wire_protocol.TokenCounter`."""

    path = "/v1/responses/input_tokens"
    name: ProtocolName = "responses"

    def read(
        self, body: bytes, conversation: Conversation, known: ReadItems | None = None, /
    ) -> Request:
        """The request in this body; as `Responses.read`."""
        return request_of(body, conversation, known)

    def counted(self, tokens: int) -> dict[str, Any]:
        """The number of context tokens as one JSON object."""
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def error(self, error: RefusedError) -> dict[str, Any]:
        """The refusal as one JSON object."""
        return refusal_body(error, messages="input")


class ResponseStream:
    """An answer as numbered events; implements `wire_protocol.WireStream`."""

    def __init__(self) -> None:
        self._written = 0
        self._cursor = PartCursor()
        self._pending = _pending("", created_s=0, model="")

    def keep_alive(self, *, request_id: str, created_s: int, model: str) -> bytes:
        """The event by which clients see that the response is made; the first one opens it."""
        pending = _pending(request_id, created_s=created_s, model=model)
        return self._opening(pending) + self._event("response.in_progress", response=pending)

    def more(self, answer: Answer) -> bytes:
        """What the answer has beyond what was written, as events."""
        return self._items(answer, is_whole=False)

    def finish(self, answers: Sequence[Answer]) -> bytes:
        """What is not written of the answer as events, to the end of the stream."""
        (answer,) = answers
        items = self._items(answer, is_whole=True)
        response = _response(answer)
        return items + self._event(f"response.{response['status']}", response=response)

    def fail(self, error: RefusedError) -> bytes:
        """The refusal as the last events: clients look for one or for the other."""
        code = error.code or error.kind
        failed = {
            **self._pending,
            "status": "failed",
            "error": {"code": code, "message": error.message},
        }
        told = self._event("response.failed", response=failed)
        param = refusal_body(error, messages="input")["error"]["param"]
        return told + self._event("error", code=code, message=error.message, param=param)

    def _opening(self, pending: dict[str, Any]) -> bytes:
        self._pending = pending
        return b"" if self._written else self._event("response.created", response=pending)

    def _items(self, answer: Answer, *, is_whole: bool) -> bytes:
        pending = _pending(answer.request_id, created_s=answer.created_s, model=answer.model)
        opening = self._opening(pending)
        if opening:
            opening += self._event("response.in_progress", response=pending)
        parts = _parts(answer) if is_whole else answer.reply.parts
        steps = self._cursor.steps(parts, is_whole=is_whole)
        return opening + b"".join(self._step(step, answer) for step in steps)

    def _step(self, step: Step, answer: Answer) -> bytes:
        item = _item(step.part, answer, index=step.place)
        return b"".join(self._event(kind, **fields) for kind, fields in _events(step, item))

    def _event(self, kind: str, **fields: Any) -> bytes:  # noqa: ANN401 - any JSON value
        event = {"type": kind, "sequence_number": self._written, **fields}
        self._written += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"


# What an item has when it begins, before its parts.
_EMPTY: dict[str, dict[str, Any]] = {
    "reasoning": {"summary": []},
    "message": {"content": []},
    "function_call": {"arguments": ""},
}


_NO_PARTS = (Text(""),)

_Events: TypeAlias = Iterator[tuple[str, dict[str, Any]]]


def _events(step: Step, item: dict[str, Any]) -> _Events:
    """What a step of the part behind this item is: kinds and fields."""
    place: dict[str, Any] = {"output_index": step.place}
    if step.kind == "begin":
        begun = {**item, "status": "in_progress", **_EMPTY[item["type"]]}
        yield "response.output_item.added", {**place, "item": begun}
    for kind, fields in _part_events(step, item):
        yield kind, {"item_id": item["id"], **place, **fields}
    if step.kind == "end":
        yield "response.output_item.done", {**place, "item": item}


def _part_events(step: Step, item: dict[str, Any]) -> _Events:
    match item["type"]:
        case "reasoning":
            yield from _text_events(step, item["summary"][0], "summary_index")
        case "message":
            yield from _text_events(step, item["content"][0], "content_index")
        case "function_call" if step.kind == "grow":
            yield "response.function_call_arguments.delta", {"delta": step.added}
        case "function_call" if step.kind == "end":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield "response.function_call_arguments.done", done


def _text_events(step: Step, part: dict[str, Any], index: str) -> _Events:
    """The events of an item's one part."""
    place: dict[str, Any] = {index: 0}
    is_output = index == "content_index"
    kind = "output" if is_output else "reasoning_summary"
    about = "content_part" if is_output else "reasoning_summary_part"
    extra = {"logprobs": part["logprobs"]} if is_output else {}
    match step.kind:
        case "begin":
            empty = {**part, "text": "", **({"logprobs": []} if is_output else {})}
            yield f"response.{about}.added", {**place, "part": empty}
        case "grow":
            yield f"response.{kind}_text.delta", {**place, "delta": step.added, **extra}
        case "end":
            yield f"response.{kind}_text.done", {**place, "text": part["text"], **extra}
            yield f"response.{about}.done", {**place, "part": part}


def _response(answer: Answer) -> dict[str, Any]:
    is_cut = answer.finish_reason == "length"
    return {
        **_pending(answer.request_id, created_s=answer.created_s, model=answer.model),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": _output(answer),
        "usage": _usage(answer),
    }


def _pending(request_id: str, *, created_s: int, model: str) -> dict[str, Any]:
    """A response without its output, with every field that a client's types demand."""
    return {
        "id": response_id(request_id),
        "object": "response",
        "created_at": created_s,
        "status": "in_progress",
        "model": model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": None,
    }


def _output(answer: Answer) -> list[dict[str, Any]]:
    """The reply's parts as items, in their order."""
    return [_item(part, answer, index=index) for index, part in enumerate(_parts(answer))]


def _parts(answer: Answer) -> tuple[Text | Thinking | Call, ...]:
    """The reply's parts; of one without any an empty text, which comes back as an item.

    A reply without items would be missing from the history that the client sends next.
    """
    return answer.reply.parts or _NO_PARTS


def _item(part: Text | Thinking | Call, answer: Answer, *, index: int) -> dict[str, Any]:
    match part:
        case Thinking(text):
            return {
                "id": item_id("rs", answer.request_id, index),
                "type": "reasoning",
                "summary": [{"type": "summary_text", "text": text}],
                "encrypted_content": signature_of(answer.request_id),
            }
        case Text(text):
            content = {
                "type": "output_text",
                "text": text,
                "annotations": [],
                "logprobs": _logprobs(part, answer),
            }
            return {
                "id": item_id("msg", answer.request_id, index),
                "type": "message",
                "status": "completed",
                "role": "assistant",
                "content": [content],
            }
        case Call():
            return {
                "id": item_id("fc", answer.request_id, index),
                "type": "function_call",
                "status": "completed",
                "call_id": part.id,
                "name": part.name,
                "arguments": part.arguments,
            }


def _logprobs(part: Text, answer: Answer) -> list[dict[str, Any]]:
    """Every sampled token, of reasoning and calls too, in the first text of the answer."""
    first = next(each for each in _parts(answer) if isinstance(each, Text))
    return entries(answer.logprobs or ()) if part is first else []


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.context_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens},
        "output_tokens": answer.output_tokens,
        # Clients demand the field; reasoning is not counted apart from the rest.
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.context_tokens + answer.output_tokens,
    }
