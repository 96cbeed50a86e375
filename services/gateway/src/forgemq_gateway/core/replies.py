"""The model's reply and the answer that a client gets, whatever protocol writes it."""

from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

from forgemq_gateway.core.digests import message_digest
from forgemq_gateway.core.requests import Call, Text, Thinking

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


class Reply(Struct, frozen=True, kw_only=True, gc=False):
    """What the model said, in its order.

    Attributes:
        malformed: Calls that could not be read; they stay in the text.
    """

    parts: tuple[Text | Thinking | Call, ...] = ()
    malformed: int = 0

    @property
    def text(self) -> str:
        """The text without reasoning and calls."""
        if len(self.parts) == 1 and isinstance(self.parts[0], Text):
            return self.parts[0].text  # Most replies, and they are asked often.
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def thinking(self) -> str:
        """The reasoning."""
        return "".join(part.text for part in self.parts if isinstance(part, Thinking))

    @property
    def characters(self) -> int:
        """Length of its text, its reasoning and its calls' arguments."""
        size = 0  # In a loop, as `calls`: both are asked of every completion.
        for part in self.parts:
            size += len(part.arguments if isinstance(part, Call) else part.text)
        return size

    @property
    def calls(self) -> tuple[Call, ...]:
        """The tool calls."""
        return tuple([part for part in self.parts if isinstance(part, Call)])


class TokenLogprob(Struct, frozen=True, kw_only=True):
    """One token as clients read it.

    Attributes:
        data: Its bytes, which may be a part of a character; None if they are not known.
        top: The most likely tokens in its place, if asked for.
    """

    token: str
    data: bytes | None
    logprob: float
    top: tuple["TokenLogprob", ...] = ()


class Answer(Struct, frozen=True, kw_only=True):
    """One completion, ready to be written whole or as a stream.

    Attributes:
        sample: Place among the completions of the same messages.
        stop_string: The client's stop string that ended it; "" if none did.
        stop_token_id: The token that ended it, if one did.
        context_ids: Its context, if the client asked for token ids.
        output_ids: What was sampled, if the client asked for token ids.
    """

    request_id: str
    sample: int = 0
    created_s: int
    model: str
    reply: Reply
    finish_reason: FinishReason
    context_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    stop_string: str = ""
    stop_token_id: int | None = None
    context_ids: tuple[int, ...] | None = None
    output_ids: tuple[int, ...] | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


def matched_stop(answer: Answer) -> str | int | None:
    """What ended the answer as SGLang says it: a stop string, a token's id, or None for a limit."""
    return answer.stop_string or answer.stop_token_id


def echo_key(reply: Reply, *, request_id: str) -> str:
    """Match key of this reply in a later history: itself if it has calls, else its text."""
    if reply.calls:
        return f"turn:{request_id}"
    return message_digest("assistant", reply.text)


def echo_digests(reply: Reply) -> tuple[str, ...]:
    """Digests of the messages that are this reply with its calls; () without calls.

    Clients may leave out the text beside the calls. The calls' ids are of this reply alone, so
    another message never has these digests.
    """
    if not reply.calls:
        return ()
    calls = [(call.id, call.name, call.arguments) for call in reply.calls]
    return tuple(message_digest("assistant", text, tool_calls=calls) for text in (reply.text, ""))


def cut_at(reply: Reply, stop: str) -> Reply:
    """The reply up to the stop string that ended it; reasoning and calls before it stay."""
    parts: list[Text | Thinking | Call] = []
    for part in reply.parts:
        found = -1 if isinstance(part, Call) or not stop else part.text.find(stop)
        if found < 0 or isinstance(part, Call):
            parts.append(part)
            continue
        if found:
            parts.append(msgspec.structs.replace(part, text=part.text[:found]))
        break
    return msgspec.structs.replace(reply, parts=tuple(parts))


def finish_reason(reply: Reply, *, sampled: str) -> FinishReason:
    """`tool_calls` if there are any, unless the output was cut."""
    if sampled == "length":
        return "length"
    return "tool_calls" if reply.calls else "stop"
