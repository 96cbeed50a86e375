"""What an answer of the gateway may be: whole, in the protocol's shape, and never a 500."""

import json
from typing import Any

from msgspec import Struct

from tests.fuzz.sound import HELLO, SOUND, SOUND_COMPLETION, SOUND_MESSAGES, SOUND_RESPONSE


class Protocol(Struct, frozen=True, kw_only=True):
    """One protocol as its client sees it.

    Attributes:
        path: Of its requests.
        sound: A body with many kinds of parts.
        plain: A body that must be answered.
        id_prefix: What the id of an answer has before the request's id.
        last_event: What the last event of a stream begins with, one of them.
    """

    path: str
    sound: dict[str, Any]
    plain: dict[str, Any]
    id_prefix: str
    last_event: tuple[str, ...]


PROTOCOLS = (
    Protocol(
        path="/v1/chat/completions",
        sound=SOUND,
        plain={"messages": [HELLO]},
        id_prefix="chatcmpl-",
        last_event=("data: [DONE]",),
    ),
    Protocol(
        path="/v1/messages",
        sound=SOUND_MESSAGES,
        plain={"messages": [HELLO], "max_tokens": 9},
        id_prefix="msg_",
        last_event=("event: message_stop", "event: error"),
    ),
    Protocol(
        path="/v1/responses",
        sound=SOUND_RESPONSE,
        plain={"input": [HELLO]},
        id_prefix="resp_",
        last_event=("event: response.completed", "event: response.incomplete", "event: error"),
    ),
    Protocol(
        path="/v1/completions",
        sound=SOUND_COMPLETION,
        plain={"prompt": "hello"},
        id_prefix="cmpl-",
        last_event=("data: [DONE]",),
    ),
)


class Answered(Struct, frozen=True, kw_only=True):
    """An answer that was read to its end."""

    status: int
    is_stream: bool
    text: str


def defect(protocol: Protocol, answered: Answered) -> str:
    """What is wrong with an answer; "" if nothing is."""
    status, text = answered.status, answered.text
    if answered.is_stream:
        last = text.rstrip().rpartition("\n\n")[2]
        return "" if last.startswith(protocol.last_event) else f"a stream that ends with {last!r}"
    try:
        answer = json.loads(text)
    except ValueError:
        return f"{status} without JSON: {text[:200]!r}"
    if status == 200:
        is_answer = str(answer.get("id", "")).startswith(protocol.id_prefix)
        return "" if is_answer else f"an answer without its id: {text[:200]!r}"
    if not 400 <= status < 500:
        return f"{status}: {text[:200]!r}"
    error = answer.get("error")
    is_error = isinstance(error, dict) and error.get("message") and error.get("type")
    return "" if is_error else f"{status} without an error: {text[:200]!r}"


def request_id(protocol: Protocol, answered: Answered) -> str:
    """The turn that this answer is of; "" if it answers none."""
    texts = [answered.text]
    if answered.is_stream:
        lines = answered.text.split("\n")
        texts = [each.removeprefix("data: ") for each in lines if each.startswith("data: {")]
    # Keep-alives have none.
    return next(filter(None, (_id(protocol, json.loads(each)) for each in texts)), "")


def _id(protocol: Protocol, value: dict[str, Any]) -> str:
    inner = value.get("message") or value.get("response") or {}
    found = str(value.get("id") or inner.get("id"))
    return found.removeprefix(protocol.id_prefix) if found.startswith(protocol.id_prefix) else ""


def continued(protocol: Protocol, body: dict[str, Any], text: str) -> dict[str, Any]:
    """The next request of a conversation: the body, this whole answer, and what the client adds."""
    answer = json.loads(text)
    match protocol.path:
        case "/v1/chat/completions":
            reply = answer["choices"][0]["message"]
            calls = reply.get("tool_calls") or []
            results = [{"role": "tool", "tool_call_id": c["id"], "content": "found"} for c in calls]
            return body | {"messages": [*body["messages"], reply, *(results or [HELLO])]}
        case "/v1/messages":
            reply = {"role": "assistant", "content": answer["content"]}
            calls = [each for each in answer["content"] if each["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": c["id"]} for c in calls]
            added = {"role": "user", "content": results} if results else HELLO
            return body | {"messages": [*body["messages"], reply, added]}
        case "/v1/responses":
            calls = [each for each in answer["output"] if each["type"] == "function_call"]
            results = [
                {"type": "function_call_output", "call_id": c["call_id"], "output": "found"}
                for c in calls
            ]
            return body | {"input": [*body["input"], *answer["output"], *(results or [HELLO])]}
    return body | {"prompt": body["prompt"] + answer["choices"][0]["text"] + " and"}
