"""What an episode has said so far, for protocols whose requests refer to it."""

from typing import Protocol

import msgspec
from msgspec import Struct

from forgemq_gateway.core.replies import Reply
from forgemq_gateway.core.requests import (
    Call,
    KeyedMessages,
    Part,
    RequestMessage,
    Role,
    Text,
    Thinking,
    ToolResult,
)


class Conversation(Protocol):
    """The replies of an episode by the request that they answered."""

    def reply_to(self, request_id: str) -> Reply | None:
        """The reply to this request; None if there is none yet."""
        ...

    def messages_until(self, request_id: str) -> KeyedMessages | None:
        """Every message up to the reply to this request, and it; None if they are not kept."""
        ...


class _Function(Struct):
    name: str
    arguments: str


class _ToolCall(Struct):
    function: _Function
    id: str = ""


class _ChatForm(Struct):
    role: Role
    content: str = ""
    tool_calls: tuple[_ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


_CHAT_FORMS = msgspec.json.Decoder(list[_ChatForm])


def logged_messages(data: bytes) -> tuple[RequestMessage, ...]:
    """The messages that `requests.chat_json` wrote."""
    return tuple(_message(form) for form in _CHAT_FORMS.decode(data))


def reply_message(reply: Reply, *, request_id: str) -> RequestMessage:
    """The reply as a message of a later request."""
    return RequestMessage(role="assistant", parts=reply.parts, answered_id=request_id)


def _message(form: _ChatForm) -> RequestMessage:
    parts: list[Part] = []
    if form.reasoning_content is not None:
        parts.append(Thinking(form.reasoning_content))
    if form.role == "tool" or form.tool_call_id is not None:
        parts.append(ToolResult(form.tool_call_id or "", form.content))
    elif form.content:
        parts.append(Text(form.content))
    parts += [
        Call(call.id, call.function.name, call.function.arguments) for call in form.tool_calls
    ]
    return RequestMessage(role=form.role, parts=tuple(parts), name=form.name)
