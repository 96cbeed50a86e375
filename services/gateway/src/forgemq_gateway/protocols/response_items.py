"""Reads the items of an OpenAI response's input as messages.

A reply comes back as several items; together they are one message again. Of items of an unknown
kind the model reads what they say.
"""

from collections.abc import Iterable, Iterator
from typing import Literal, TypeAlias, get_args

import msgspec
from msgspec import Raw, Struct

from forgemq_gateway.core.conversation import Conversation, reply_message
from forgemq_gateway.core.digests import parted_reasoning
from forgemq_gateway.core.errors import unknown
from forgemq_gateway.core.requests import (
    Call,
    Part,
    RequestMessage,
    Role,
    Text,
    Thinking,
    ToolResult,
)
from forgemq_gateway.protocols.json_body import NULL, decoded_at, is_array, items_in
from forgemq_gateway.protocols.other_content import Kinds, Told, text_of_json, unread
from forgemq_gateway.protocols.response_ids import answered_by
from forgemq_gateway.protocols.signature import signed_request

Media: TypeAlias = Literal["input_image", "input_file", "input_audio"]
Said: TypeAlias = Literal[
    "text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal"
]
Kind: TypeAlias = Literal[
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "item_reference",
]


# As in `chat_body.py`: no collection of cycles while many are made.
class ItemPart(Struct, gc=False):
    """One part of an item's content or summary."""

    type: Said | Media | None = None
    text: str | None = None
    refusal: str | None = None


class Item(Struct, gc=False):
    """One item of the input; each type has some of these fields."""

    type: Kind = "message"
    role: Role = "user"
    content: Raw = NULL
    summary: Raw = NULL
    encrypted_content: str | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: Raw = NULL


_MEDIA = frozenset(get_args(Media))
_RESULTS = frozenset({"function_call_output", "custom_tool_call_output"})
_ASSISTANTS = frozenset({"reasoning", "function_call", "custom_tool_call", "item_reference"})

ITEM: msgspec.json.Decoder[Item | Told] = msgspec.json.Decoder(Item)
_TEXT = msgspec.json.Decoder(str | None)
_PART: msgspec.json.Decoder[ItemPart | Told] = msgspec.json.Decoder(ItemPart)
_ROLES = frozenset(get_args(Role))


def _mend(fields: dict[str, Raw]) -> None:
    """Let a role that is not known be a user's, and what a call is given be text."""
    if "role" in fields and text_of_json(fields["role"], where="role") not in _ROLES:
        fields["role"] = Raw(b'"user"')
    for name in ("arguments", "input"):
        given = bytes(fields.get(name, NULL))
        if given.startswith(b"{"):
            fields[name] = Raw(msgspec.json.encode(given.decode()))


KINDS = Kinds(
    ITEM,
    {
        **dict.fromkeys(("message", None), frozenset({"role", "content", "id"})),
        "reasoning": frozenset({"content", "summary", "encrypted_content", "id"}),
        "function_call": frozenset({"call_id", "name", "arguments", "id"}),
        "function_call_output": frozenset({"call_id", "output"}),
        "custom_tool_call": frozenset({"call_id", "name", "input", "id"}),
        "custom_tool_call_output": frozenset({"call_id", "output"}),
        "item_reference": frozenset({"id"}),
    },
    mend=_mend,
)
_PARTS = Kinds(
    _PART,
    {
        **dict.fromkeys((*get_args(Said), None), frozenset({"text", "refusal"})),
        **dict.fromkeys(_MEDIA, frozenset()),
    },
)


def messages_in(
    items: Iterable[tuple[str, Item | Told]], known: Conversation
) -> Iterator[RequestMessage]:
    """The messages in these items: those of one reply are one message.

    What an unknown item says between two of a reply comes behind the reply.
    """
    reply = _OpenReply()
    for where, item in items:
        if isinstance(item, Told):
            if not item.is_bare:
                yield from reply.aside(RequestMessage(role="user", parts=(Text(item.text),)))
        elif item.type in _ASSISTANTS or (item.type == "message" and item.role == "assistant"):
            if reply.is_over_at(item):
                yield from reply.closed()
            reply.add(item, known, where=where)
        else:
            yield from reply.closed()
            yield _other(item, where=where)
    yield from reply.closed()


class _OpenReply:
    """The items of one reply, as far as they have come."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._answered_id = ""
        self._is_whole = False
        self._behind: list[RequestMessage] = []

    def is_over_at(self, item: Item) -> bool:
        """Whether this item begins another reply: by its id, or because it comes too late."""
        answered = _answered_by(item)
        if answered and self._answered_id:
            return answered != self._answered_id
        rank = _RANKS.get(item.type, 0)
        if any(_rank_of(part) > rank for part in self._parts):
            return True
        # A text that is all reasoning is no answer yet: clients write a message for each of both.
        said = "".join(part.text for part in self._parts if isinstance(part, Text))
        return rank == 1 and bool(said) and bool(parted_reasoning(said)[1].strip())

    def add(self, item: Item, known: Conversation, *, where: str) -> None:
        """Add an item; a reference stands for the whole reply that it is of."""
        answered = _answered_by(item)
        if item.type == "item_reference":
            reply = known.reply_to(answered)
            if reply is None:
                raise unknown(f"{where}.id: this episode has no item {item.id!r}")
            self._parts = list(reply_message(reply, request_id=answered).parts)
            self._is_whole = True
        elif not self._is_whole:
            self._parts.append(_assistant_part(item, where=where))
        self._answered_id = self._answered_id or answered

    def aside(self, message: RequestMessage) -> Iterator[RequestMessage]:
        """The message, if no item of a reply has come; else it follows the reply."""
        if self._parts:
            self._behind.append(message)
        else:
            yield message

    def closed(self) -> Iterator[RequestMessage]:
        """The reply as a message, if there is one, and what follows it; then begin again."""
        if self._parts or self._is_whole:
            yield RequestMessage(
                role="assistant", parts=tuple(self._parts), answered_id=self._answered_id
            )
        yield from self._behind
        self._parts, self._answered_id, self._is_whole, self._behind = [], "", False, []


# The order in which a reply has its parts.
_RANKS = {"reasoning": 0, "message": 1, "function_call": 2, "custom_tool_call": 2}


def _rank_of(part: Part) -> int:
    return 0 if isinstance(part, Thinking) else 1 if isinstance(part, Text) else 2


def _answered_by(item: Item) -> str:
    """The request that the item's reply answered; "" if the item does not say."""
    return answered_by(item.id or "") or signed_request(item.encrypted_content or "")


def _assistant_part(item: Item, *, where: str) -> Part:
    match item.type:
        case "reasoning":
            content = _text(item.content, where=f"{where}.content", role="assistant")
            return Thinking(
                content or _text(item.summary, where=f"{where}.summary", role="assistant")
            )
        case "function_call":
            return Call(item.call_id or "", item.name or "", item.arguments or "{}")
        case "custom_tool_call":
            given = msgspec.json.encode({"input": item.input or ""}).decode()
            return Call(item.call_id or "", item.name or "", given)
    return Text(_text(item.content, where=f"{where}.content", role="assistant"))


def closes(item: Item | Told) -> bool:
    """Whether no later item belongs to a reply before this one."""
    if isinstance(item, Told):
        return False
    return item.type in _RESULTS or (item.type == "message" and item.role != "assistant")


def _other(item: Item, *, where: str) -> RequestMessage:
    """A message that is not the model's."""
    if item.type in _RESULTS:
        text = _text(item.output, where=f"{where}.output", role="tool")
        return RequestMessage(role="tool", parts=(ToolResult(item.call_id or "", text),))
    text = _text(item.content, where=f"{where}.content", role=item.role)
    return RequestMessage(role=item.role, parts=(Text(text),))


def _text(content: Raw, *, where: str, role: Role) -> str:
    """A text, or that of an item's parts joined."""
    if not is_array(content):
        return decoded_at(content, _TEXT, where=where) or ""
    parts = items_in(content, _PART, where=where, again=_PARTS.read_again)
    return "".join(_part_text(part, where=place, role=role) for place, part in parts)


def _part_text(part: ItemPart | Told, *, where: str, role: Role) -> str:
    if isinstance(part, Told):
        # What the model did not say is no part of its reply, which is known by its text.
        return "" if role == "assistant" and not part.is_plain else part.line
    if part.type is not None and part.type in _MEDIA:
        return unread(part.type, role=role, where=where)
    return part.text or part.refusal or ""
