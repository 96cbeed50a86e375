"""The model's reply and the answer that a client gets, whatever protocol writes it."""

from typing import Literal, TypeAlias

from msgspec import Struct

from forgemq_gateway.core.digests import message_digest
from forgemq_gateway.core.requests import Call, Text, Thinking

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


class Reply(Struct, frozen=True, kw_only=True):
    """What the model said, in its order.

    Attributes:
        malformed: Calls that could not be read; they stay in the text.
    """

    parts: tuple[Text | Thinking | Call, ...] = ()
    malformed: int = 0

    @property
    def text(self) -> str:
        """The text without reasoning and calls."""
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def thinking(self) -> str:
        """The reasoning."""
        return "".join(part.text for part in self.parts if isinstance(part, Thinking))

    @property
    def calls(self) -> tuple[Call, ...]:
        """The tool calls."""
        return tuple(part for part in self.parts if isinstance(part, Call))


class TokenLogprob(Struct, frozen=True, kw_only=True):
    """One sampled token as clients read it."""

    token: str
    logprob: float


class Answer(Struct, frozen=True, kw_only=True):
    """One completion, ready to be written whole or as a stream."""

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
    """Match key of this reply in a later history: its calls' ids if it has any, else its text."""
    if reply.calls:
        return f"turn:{request_id}"
    return message_digest("assistant", reply.text)


def finish_reason(reply: Reply, *, sampled: str) -> FinishReason:
    """`tool_calls` if there are any, unless the output was cut."""
    if sampled == "length":
        return "length"
    return "tool_calls" if reply.calls else "stop"
