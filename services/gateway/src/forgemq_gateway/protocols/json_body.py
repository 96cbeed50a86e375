"""What all protocols share in reading a JSON body: its fields, its tools, its refusals."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Any, TypeAlias, TypeVar

import msgspec
from msgspec import Raw, Struct, ValidationError
from msgspec.structs import asdict, astuple

from forgemq_gateway.core.digests import digest_of
from forgemq_gateway.core.errors import RefusedError, field_of, invalid
from forgemq_gateway.core.requests import MESSAGES_MAX, TOOLS_BYTES_MAX

Fields = TypeVar("Fields")
Item = TypeVar("Item")

ReadAgain: TypeAlias = Callable[[Raw, str, RefusedError], Item]
"""Reads an item in another way, given its place and why it was refused; or raises that."""

NULL = Raw(b"null")
"""A field that a client sends without a value."""

_NO_LIMITS: Mapping[str, int] = {}

# To decode holds the interpreter, 0.3 s for 6 MB of small values, so what may be long is decoded in
# pieces. The fields beside it that are read are sampling settings and names. Those that are not
# read may be as long as the body.
_OTHER_BYTES_MAX = 256 * 1024

_UNREAD = ""
"""Stands for all fields that are not read, if they are long."""


class LongFields(Struct):
    """The fields that may be long."""

    messages: Raw = Raw()
    system: Raw = Raw()
    input: Raw = Raw()
    prompt: Raw = Raw()
    instructions: Raw = Raw()
    tools: Raw = Raw()


_NO_ITEM = Raw()

# A list is decoded to its end, 0.1 s for two million items, before its length is compared with a
# limit. A struct with a field for each item is not: an item too many ends it.
_Items = msgspec.defstruct(
    "_Items",
    [(f"item_{index}", Raw, _NO_ITEM) for index in range(MESSAGES_MAX)],
    array_like=True,
    forbid_unknown_fields=True,
)

_LONG = msgspec.json.Decoder(LongFields)
_RAW = msgspec.json.Decoder(dict[str, Raw])
_ITEMS = msgspec.json.Decoder(_Items)
_FEW_ITEMS = msgspec.json.Decoder(list[Raw])
_TOOL = msgspec.json.Decoder(dict[str, Any])

# An item takes two bytes with its comma: so few bytes hold no item too many.
_FEW_ITEMS_BYTES_MAX = 2 * MESSAGES_MAX


def named_fields(fields: type[Struct], names: Iterable[str]) -> "msgspec.json.Decoder[Struct]":
    """Decodes the fields of a struct, and those with these names, as JSON; it skips all others."""
    every = dict.fromkeys((*fields.__struct_fields__, *names, *LongFields.__struct_fields__))
    return msgspec.json.Decoder(raw_struct(every))


def raw_struct(names: Iterable[str]) -> type[Struct]:
    """A struct of fields with these names, each of which may be anything or missing."""
    return msgspec.defstruct("_Raws", [(name, Raw, _NO_ITEM) for name in names])


def raw_fields(decoded_struct: Struct) -> dict[str, Raw]:
    """The fields that are there, of those of a `raw_struct`."""
    return {name: value for name, value in asdict(decoded_struct).items() if value != _NO_ITEM}


def decoded(
    body: bytes,
    decoder: "msgspec.json.Decoder[Fields]",
    *,
    named: "msgspec.json.Decoder[Struct]",
    limits: Mapping[str, int] = _NO_LIMITS,
) -> tuple[dict[str, Raw], Fields]:
    """Every field of the body as JSON, and those that the decoder knows.

    Args:
        body: As the client sent it.
        decoder: Of the fields that are read.
        named: Of the same fields, and of others whose value is asked for, as `named_fields`.
        limits: The most bytes of fields beside the tools.

    Raises:
        RefusedError: 400: it is no JSON, or a field is wrong or too long.
    """
    try:
        body.decode()  # JSON is UTF-8, also in the parts that are decoded later or only kept.
        if len(body) > _OTHER_BYTES_MAX and _has_long_rest(_LONG.decode(body), body):
            raw = _named(body, named)
        else:
            raw = _RAW.decode(body)
        for name, bytes_max in (("tools", TOOLS_BYTES_MAX), *limits.items()):
            if len(body) > bytes_max and len(memoryview(raw.get(name, Raw()))) > bytes_max:
                raise invalid(f"{name} must have at most {bytes_max} bytes", param=name)
        return raw, decoder.decode(body)
    except ValidationError as error:
        raise invalid(str(error), param=field_of(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is not valid JSON: {error}", param=None) from error


def _has_long_rest(long: LongFields, body: bytes) -> bool:
    """Whether more than a few bytes are in other fields than the long ones."""
    return len(body) - sum(len(memoryview(value)) for value in astuple(long)) > _OTHER_BYTES_MAX


def _named(body: bytes, named: "msgspec.json.Decoder[Struct]") -> dict[str, Raw]:
    """The named fields of a body with a long rest; all others are one, whose value is a digest.

    They may be very many, and nobody asks for any of them: so none is decoded or kept. The digest
    is that of the body without its long fields, which are compared by what they say.

    Raises:
        RefusedError: 400: the named fields beside the long ones are too long.
    """
    raw = raw_fields(named.decode(body))
    long = LongFields.__struct_fields__
    sizes = {name: len(memoryview(value)) for name, value in raw.items() if name not in long}
    if sum(sizes.values()) > _OTHER_BYTES_MAX:
        longest = max(sizes, key=sizes.__getitem__)
        raise invalid(
            f"{longest} is too long: the fields beside {', '.join(long)} that are read must have "
            f"at most {_OTHER_BYTES_MAX} bytes",
            param=longest,
        )
    rest = body
    for name in long:
        if name in raw:
            rest = rest.replace(bytes(raw[name]), b"", 1)
    return {**raw, _UNREAD: Raw(b'"%b"' % digest_of(rest).encode())}


def items_in(
    raw: Raw,
    decoder: "msgspec.json.Decoder[Item]",
    *,
    where: str,
    again: ReadAgain[Item] | None = None,
) -> Iterator[tuple[str, Item]]:
    """The items of an array, each with its place (`messages[3]`), decoded when it is asked for.

    The interpreter is held for one item at a time: other threads run between two of them.

    Args:
        raw: The array.
        decoder: Of one item.
        where: Place of the array.
        again: Reads what the decoder refuses, given the refusal; or raises it.

    Raises:
        RefusedError: 400: it is no array, has over MESSAGES_MAX items, or an item is wrong.
    """
    for index, item in enumerate(raw_items(raw, where=where)):
        place = f"{where}[{index}]"
        yield place, item_at(item, decoder, where=place, again=again)


def item_at(
    item: Raw,
    decoder: "msgspec.json.Decoder[Item]",
    *,
    where: str,
    again: ReadAgain[Item] | None,
) -> Item:
    """One item, decoded; `again` reads what the decoder refuses, or raises the refusal."""
    try:
        return decoded_at(item, decoder, where=where)
    except RefusedError as error:
        if again is None:
            raise
        return again(item, where, error)


def raw_items(raw: Raw, *, where: str) -> Iterator[Raw]:
    """The items of an array as JSON.

    Raises:
        RefusedError: 400: it is no array, or has over MESSAGES_MAX items.
    """
    if len(memoryview(raw)) <= _FEW_ITEMS_BYTES_MAX:
        few = decoded_at(raw, _FEW_ITEMS, where=where)
        return iter(few)
    items = astuple(decoded_at(raw, _ITEMS, where=where))
    return takewhile(lambda item: item is not _NO_ITEM, items)


def decoded_at(raw: Raw, decoder: "msgspec.json.Decoder[Item]", *, where: str) -> Item:
    """A part of the body as the decoder reads it.

    Raises:
        RefusedError: 400, naming the field below `where` that is wrong.
    """
    try:
        return decoder.decode(raw)
    except ValidationError as error:
        explained, _, path = str(error).partition(" - at `$")
        path = path.rstrip("`")
        placed = ValidationError(f"{explained} - at `$.{where}{path}`")
        raise invalid(str(placed), param=field_of(placed)) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"{where}: {error}", param=where) from error


def is_array(raw: Raw) -> bool:
    """Whether this is an array; no other value begins as one."""
    return bytes(memoryview(raw)[:1]) == b"["


def tools_in(raw: Raw, checked: "msgspec.json.Decoder[Any]" = _TOOL) -> list[dict[str, Any]]:
    """The tools as the client sent them; [] for null.

    Args:
        raw: The field.
        checked: What each must be.

    Raises:
        RefusedError: 400: no array, too many, not as `checked` says, an integer of over 64 bits, or
            nested too deep.
    """
    if raw == NULL:
        return []
    tools = []
    for index, tool in enumerate(raw_items(raw, where="tools")):
        where = f"tools[{index}]"
        decoded_at(tool, checked, where=where)
        tools.append(decoded_at(tool, _TOOL, where=where))
    return tools
