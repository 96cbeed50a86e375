"""What an item or a block says whose kind the gateway does not know, as text for the model.

Protocols gain kinds of items and blocks, and fields of them. A new one is no error: the model gets
what text it has, or else its JSON. What no model reads, as ids and encoded bytes, is left out.
"""

import re
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import msgspec
from msgspec import Raw, Struct

from forgemq_gateway.core.errors import RefusedError, invalid
from forgemq_gateway.protocols.json_body import (
    NULL,
    decoded_at,
    is_array,
    raw_fields,
    raw_items,
    raw_struct,
)

Item = TypeVar("Item")


class Told(Struct, frozen=True, gc=False):
    """What an item or block of an unknown kind says.

    Attributes:
        is_plain: It is the text of a block that has nothing else.
        is_bare: There is nothing but its kind.
    """

    text: str
    is_plain: bool = False
    is_bare: bool = False

    @property
    def line(self) -> str:
        """Its text, apart from what follows."""
        return self.text if self.is_plain else f"{self.text}\n"


class _Other(Struct):
    """The fields in which blocks have their text."""

    title: Raw = NULL
    source: Raw = NULL
    text: Raw = NULL
    content: Raw = NULL
    thinking: Raw = NULL
    summary: Raw = NULL


# What says nothing to a model.
_IDS = ("id", "call_id", "tool_use_id")
_MARKS = frozenset((*_IDS, "status", "role", "cache_control", "signature", "encrypted_content"))
_EMPTY = frozenset((b"null", b'""', b"[]", b"{}"))

# Encoded bytes, as of an image: no word is so long.
_ENCODED = re.compile(rb"[A-Za-z0-9+/=_-]{1024,}")

# Texts are looked for in blocks of blocks, and no deeper: each level is read once more.
_DEPTH_MAX = 4

# To decode very many names would hold the interpreter.
_NAMES_MAX = 10_000

_OTHER = msgspec.json.Decoder(_Other)
_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_TEXT = msgspec.json.Decoder(str)


class Kinds(Generic[Item]):
    """The kinds of items or blocks that a protocol knows.

    Args:
        decoder: Of a struct that has the fields of all kinds.
        fields_of: The fields of each kind; None: of an item that does not say its kind.
        mend: Called with the fields of an item of a known kind before it is read again.
    """

    def __init__(
        self,
        decoder: "msgspec.json.Decoder[Item]",
        fields_of: Mapping[str | None, frozenset[str]],
        *,
        mend: Callable[[dict[str, Raw]], None] = lambda _: None,
    ) -> None:
        self._decoder = decoder
        self._fields_of = fields_of
        self._mend = mend
        names = {"type"}.union(*fields_of.values())
        self._raw = msgspec.json.Decoder(raw_struct(sorted(names)))

    def read_again(self, item: Raw, where: str, error: RefusedError) -> Item | Told:
        """An item that the decoder refuses, read by its kind: without fields that are not its own.

        Args:
            item: As the client sent it.
            where: Its place.
            error: The refusal, which holds for what is no object.

        Raises:
            RefusedError: 400, naming the field: its kind is known, and the field is wrong.
        """
        if bytes(memoryview(item)[:1]) != b"{":
            raise error
        given = raw_fields(decoded_at(item, self._raw, where=where))
        fields = {name: value for name, value in given.items() if value != NULL}
        kind = text_of_json(fields.get("type", NULL), where=f"{where}.type")
        if kind is None and "type" in fields:
            raise error
        own = self._fields_of.get(kind)
        if own is None:
            return told(item, where=where)
        kept = {name: value for name, value in fields.items() if name in own or name == "type"}
        self._mend(kept)
        return decoded_at(Raw(msgspec.json.encode(kept)), self._decoder, where=where)


def told(item: Raw, *, where: str, depth: int = 0) -> Told:
    """What an object of an unknown kind says: its text with title and source, or else its JSON.

    Raises:
        RefusedError: 400: an array in it is too long, or a text is not a string.
    """
    other = decoded_at(item, _OTHER, where=where)
    plain = text_of_json(other.text, where=where)
    if plain:
        return Told(plain, is_plain=True)
    text = ""
    for place in (other.text, other.content, other.thinking, other.summary):
        if place != NULL and not text:
            text = text_in(place, where=where, depth=depth)
    if not text:
        return Told(_without_encoded(bytes(item))) if depth else _as_json(item, where=where)
    heads = [text_of_json(head, where=where) for head in (other.title, other.source)]
    return Told(lines_of(*heads, text))


def unread(kind: str, *, role: str, where: str) -> str:
    """What is read of content that is no text, as an image: in a tool's result that it is left out.

    There the policy asked for it, as a reader of files gives one, and its agent can leave out
    nothing: each later request has the result again.

    Raises:
        RefusedError: 400: it is in another message, whose author means it to be seen.
    """
    if role == "tool":
        return f"[{kind} left out: the model reads text]\n"
    raise invalid(
        f"content of type {kind} is not supported: the model reads text", param=f"{where}.type"
    )


def lines_of(*texts: str | None) -> str:
    """Each text that there is, on a line of its own."""
    return "\n".join(text for text in texts if text)


def text_in(raw: Raw, *, where: str, depth: int = 0) -> str:
    """All text in a value: a text, a block, or an array of these; "" without any.

    Raises:
        RefusedError: 400: an array in it is too long, or a text is not a string.
    """
    plain = text_of_json(raw, where=where)
    if plain is not None:
        return plain
    if bytes(memoryview(raw)[:1]) not in (b"[", b"{"):
        return ""
    if depth == _DEPTH_MAX:
        return _without_encoded(bytes(raw))
    if not is_array(raw):
        return told(raw, where=where, depth=depth + 1).text
    items = raw_items(raw, where=where)
    return lines_of(*(text_in(item, where=where, depth=depth + 1) for item in items))


def text_of_json(raw: Raw, *, where: str) -> str | None:
    """The text that this is; None for any other value."""
    is_text = bytes(memoryview(raw)[:1]) == b'"'
    return decoded_at(raw, _TEXT, where=where) if is_text else None


def _as_json(item: Raw, *, where: str) -> Told:
    """The object as JSON, without what no model reads."""
    data = bytes(item)
    if data.count(b":") > _NAMES_MAX:
        return Told(_without_encoded(data))
    said = {
        name: value
        for name, value in decoded_at(item, _FIELDS, where=where).items()
        if name not in _MARKS and bytes(value) not in _EMPTY
    }
    is_bare = not said.keys() - {"type"}
    return Told(_without_encoded(msgspec.json.encode(said)), is_bare=is_bare)


def _without_encoded(data: bytes) -> str:
    return _ENCODED.sub(b"...", data).decode()
