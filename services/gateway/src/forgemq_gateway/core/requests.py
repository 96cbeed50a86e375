"""A client's request as every protocol gives it: messages with ordered parts, tools and limits.

Nothing here knows how a protocol writes a request or a reply; `protocols` has one file for each.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

from forgemq_contracts.context_cuts import ContextCut
from forgemq_gateway.core.digests import message_digest, parted_reasoning
from forgemq_gateway.core.raw_prompts import Prompt

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool", "function"]
ProtocolName: TypeAlias = Literal["chat_completions", "messages", "responses", "completions"]

# 20 microseconds of a template, in characters of `INLINE_SIZE_MAX`.
_MARKUP_CHARACTERS = 256

DEFAULT_MODEL = "policy"
"""The name of the only model; clients may ask for any name and get this one."""

# Each costs several tokens of markup, and about 0.1 ms of work.
MESSAGES_MAX = 10_000

# Of all messages together: a text, reasoning and a call for each. What the event loop does for a
# request, it does for each message and part.
PARTS_MAX = 3 * MESSAGES_MAX

# About 250,000 tokens; 1 MiB of small values holds the interpreter for 10 ms when it is decoded.
TOOLS_BYTES_MAX = 1024 * 1024

# A field that demands a form, as a schema. OpenAI takes 120,000 characters of names and values.
FORM_BYTES_MAX = 128 * 1024


class Text(Struct, frozen=True, tag=True, gc=False):
    """Text for or by the model."""

    text: str


class Thinking(Struct, frozen=True, tag=True, gc=False):
    """The model's reasoning; no part of the match key, because clients drop or change it."""

    text: str


class Call(Struct, frozen=True, tag=True, gc=False):
    """One tool call; `arguments` is JSON text as the model or the client wrote it."""

    id: str
    name: str
    arguments: str


class ToolResult(Struct, frozen=True, tag=True, gc=False):
    """What a tool answered to the call with this id."""

    call_id: str
    text: str


Part: TypeAlias = Text | Thinking | Call | ToolResult


class RequestMessage(Struct, frozen=True, gc=False):
    """One message; what a client adds beyond these fields is dropped.

    Those of an episode's newest bodies are kept, 10,000 of a body at most. None can be part of a
    cycle, so the collector is not to visit them: it would hold the event loop.

    Attributes:
        answered_id: The request that an echoed reply answered, if the protocol lets it say so.
    """

    role: Role
    parts: tuple[Part, ...] = ()
    name: str | None = None
    answered_id: str = ""


class KeyedMessages(Struct, frozen=True):
    """Messages, the match key of each, and the number of all their parts."""

    messages: tuple[RequestMessage, ...] = ()
    keys: tuple[str, ...] = ()
    part_count: int = 0

    @classmethod
    def of(cls, messages: Iterable[RequestMessage]) -> "KeyedMessages":
        """These messages with their keys."""
        given = tuple(messages)
        keys = tuple([match_key(message) for message in given])
        return cls(given, keys, sum([len(message.parts) for message in given]))

    @classmethod
    def joined(cls, given: Sequence["KeyedMessages"]) -> "KeyedMessages":
        """All messages of these, one after the other."""
        return cls(
            tuple([message for each in given for message in each.messages]),
            tuple([key for each in given for key in each.keys]),
            sum([each.part_count for each in given]),
        )

    def without_first(self) -> "KeyedMessages":
        """All but the first message, which is there."""
        first = len(self.messages[0].parts)
        return KeyedMessages(self.messages[1:], self.keys[1:], self.part_count - first)

    def __add__(self, other: "KeyedMessages") -> "KeyedMessages":
        """These messages, then the others."""
        return KeyedMessages.joined((self, other))


class ReadItems(Struct, frozen=True, kw_only=True):
    """The array of messages in a body.

    Attributes:
        start: Bytes of the body up to its opening bracket, which is one of them.
        rest: Bytes of the body behind its last item.
        count: Number of items; one may be several messages, or none.
        found: The messages in the items.
    """

    protocol: ProtocolName
    start: int
    rest: int
    count: int
    found: KeyedMessages


class Echo(Struct, frozen=True):
    """What an echoed reply says about which reply it is, beside its text and calls."""

    thought: str = ""
    answered_id: str = ""


class ReplyForm(Struct, frozen=True, kw_only=True):
    """The form that a reply must have.

    Attributes:
        answer: Format of a text without calls, as structural tags have it; None: no such reply.
        functions: Names of the functions that may be called; () for none.
        param: The client's field that demands it.
    """

    answer: Mapping[str, Any] | None = None
    functions: tuple[str, ...] = ()
    param: str


class Request(Struct, frozen=True, kw_only=True):
    """One checked request.

    Attributes:
        prompts: What the model continues without a template, in place of messages.
        model: The name the client asked for; the answer repeats it.
        tools: As the client sent them.
        tools_json: The same as JSON; b"" without tools.
        tools_digest: Digest of the tools, whatever the order of their keys; "" without tools.
        body_digest: Digest of everything that decides the answer.
        asked: What the client asked about sampling, JSON.
        n: How many completions of the messages, or of each prompt, it asks for.
        includes_usage: Whether a stream ends with the token counts.
        top_tokens: How many of the most likely tokens it wants beside each sampled one.
        returns_ids: Whether the answer has token ids.
        form: None: the reply may be anything.
        is_one_call: The reply ends with its first call.
        unused: Fields that the client set and the episode decides; the answer names them.
        items: Where its messages are in its body, if a later body may go on from them.
        cuts: What the agent did to its context before it.
        reply: The reply, of a conversation that was finished elsewhere; None: it is sampled.
    """

    protocol: ProtocolName
    model: str
    messages: tuple[RequestMessage, ...]
    digests: tuple[str, ...]
    tools: tuple[dict[str, Any], ...] = ()
    tools_json: bytes = b""
    tools_digest: str = ""
    body_digest: str
    asked: bytes
    prompts: tuple[Prompt, ...] = ()
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    is_stream: bool = False
    includes_usage: bool = False
    wants_logprobs: bool = False
    top_tokens: int = 0
    returns_ids: bool = False
    form: ReplyForm | None = None
    is_one_call: bool = False
    unused: tuple[str, ...] = ()
    items: "ReadItems | None" = None
    cuts: tuple[ContextCut, ...] = ()
    reply: RequestMessage | None = None

    def echo(self, index: int) -> Echo:
        """What this message says about which reply it is."""
        message = self.messages[index]
        return Echo(thought_of(message), message.answered_id)


def _plain_text(message: RequestMessage) -> str | None:
    """The text of a message that is one text and nothing else, as most are."""
    if len(message.parts) == 1 and isinstance(message.parts[0], Text):
        return message.parts[0].text
    return None


def text_of(message: RequestMessage) -> str:
    """The message's text and tool results, joined."""
    plain = _plain_text(message)
    if plain is not None:
        return plain
    return "".join(part.text for part in message.parts if isinstance(part, Text | ToolResult))


def calls_of(message: RequestMessage) -> list[Call]:
    """The message's tool calls, in order."""
    return [part for part in message.parts if isinstance(part, Call)]


def thought_of(message: RequestMessage) -> str:
    """The reasoning that comes with an assistant's message; "" without any."""
    if message.role != "assistant":
        return ""
    apart = "".join(part.text for part in message.parts if isinstance(part, Thinking))
    return (apart or parted_reasoning(text_of(message))[0]).strip()


def match_key(message: RequestMessage) -> str:
    """Digest by which this message is found again in a later history."""
    plain = _plain_text(message)
    if plain is not None:
        return message_digest(message.role, plain)
    return message_digest(
        message.role,
        text_of(message),
        tool_calls=[(call.id, call.name, call.arguments or "{}") for call in calls_of(message)],
        tool_call_id=_result_id(message) or "",
    )


def chat_form(message: RequestMessage) -> dict[str, Any]:
    """The message in OpenAI's chat form, which the rendering library and the log take."""
    plain = _plain_text(message)
    if plain is not None and message.name is None:
        return {"role": message.role, "content": plain}
    form: dict[str, Any] = {"role": message.role}
    text, calls = text_of(message), calls_of(message)
    if text or not calls:
        form["content"] = text
    if calls:
        form["tool_calls"] = [_call_form(call) for call in calls]
    result_id = _result_id(message)
    if result_id:
        form["tool_call_id"] = result_id
    if message.name is not None:
        form["name"] = message.name
    thinking = [part.text for part in message.parts if isinstance(part, Thinking)]
    if thinking:
        form["reasoning_content"] = "".join(thinking)
    return form


def chat_json(messages: Sequence[RequestMessage]) -> bytes:
    """The messages in chat form as a JSON array."""
    return msgspec.json.encode([chat_form(message) for message in messages])


def canonical_tools(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """The same bytes for tools that differ only in the order of their keys."""
    return json_array(tools, order="deterministic")


def json_array(
    items: Sequence[Mapping[str, Any]], *, order: Literal["deterministic"] | None = None
) -> bytes:
    """The items as a JSON array, written one by one: other threads run between two of them."""
    return b"[" + b",".join(msgspec.json.encode(item, order=order) for item in items) + b"]"


def size_of(messages: Sequence[RequestMessage]) -> int:
    """Characters of everything in the messages that a template may show."""
    size = 0  # Summed in loops: it is asked three times a turn, and a generator costs more.
    for message in messages:
        for part in message.parts:
            size += _length(part)
    return size


def work_size(messages: Sequence[RequestMessage]) -> int:
    """As `size_of`, with the markup: to render a message takes as long as this many characters."""
    markup = len(messages)
    for message in messages:
        markup += len(message.parts)
    return size_of(messages) + _MARKUP_CHARACTERS * markup


def shown_texts(messages: Sequence[RequestMessage]) -> Iterator[str]:
    """Texts that every template shows whole: not reasoning, which it drops from earlier turns."""
    for message in messages:
        for part in message.parts:
            if isinstance(part, Text | ToolResult) and not _has_reasoning(message.role, part.text):
                yield part.text


def _length(part: Part) -> int:
    return len(part.name) + len(part.arguments) if isinstance(part, Call) else len(part.text)


def _has_reasoning(role: Role, text: str) -> bool:
    return role == "assistant" and "</think>" in text


def _call_form(call: Call) -> dict[str, Any]:
    form: dict[str, Any] = {"function": {"name": call.name, "arguments": call.arguments}}
    return {**form, "id": call.id} if call.id else form


def _result_id(message: RequestMessage) -> str | None:
    for part in message.parts:
        if isinstance(part, ToolResult):
            return part.call_id
    return None
