"""What all protocols share in reading a JSON body: its fields, its tools, its refusals."""

from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct, ValidationError
from msgspec.structs import astuple

from forgemq_gateway.core.errors import field_of, invalid
from forgemq_gateway.core.requests import MESSAGES_MAX, TOOLS_BYTES_MAX

Fields = TypeVar("Fields")
Item = TypeVar("Item")

NULL = Raw(b"null")
"""A field that a client sends without a value."""

_NO_LIMITS: Mapping[str, int] = {}

# To decode holds the interpreter, 0.3 s for 6 MB of small values, so what may be long is decoded in
# pieces. The fields beside it are sampling settings, names and clients' metadata.
_OTHER_BYTES_MAX = 256 * 1024


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


def decoded(
    body: bytes, decoder: "msgspec.json.Decoder[Fields]", *, limits: Mapping[str, int] = _NO_LIMITS
) -> tuple[dict[str, Raw], Fields]:
    """Every field of the body as JSON, and those that the decoder knows.

    Args:
        body: As the client sent it.
        decoder: Of the fields that are read.
        limits: The most bytes of fields beside the tools.

    Raises:
        RefusedError: 400: it is no JSON, or a field is wrong or too long.
    """
    try:
        body.decode()  # JSON is UTF-8, also in the parts that are decoded later or only kept.
        if len(body) > _OTHER_BYTES_MAX:
            _check_size(_LONG.decode(body), body_bytes=len(body))
        raw = _RAW.decode(body)
        for name, bytes_max in (("tools", TOOLS_BYTES_MAX), *limits.items()):
            if len(body) > bytes_max and len(memoryview(raw.get(name, Raw()))) > bytes_max:
                raise invalid(f"{name} must have at most {bytes_max} bytes", param=name)
        return raw, decoder.decode(body)
    except ValidationError as error:
        raise invalid(str(error), param=field_of(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is not valid JSON: {error}", param=None) from error


def _check_size(long: LongFields, *, body_bytes: int) -> None:
    names = long.__struct_fields__
    if body_bytes - sum(len(memoryview(getattr(long, name))) for name in names) > _OTHER_BYTES_MAX:
        raise invalid(
            f"the fields beside {', '.join(names)} must have at most {_OTHER_BYTES_MAX} bytes",
            param=None,
        )


def items_in(
    raw: Raw, decoder: "msgspec.json.Decoder[Item]", *, where: str
) -> Iterator[tuple[str, Item]]:
    """The items of an array, each with its place (`messages[3]`), decoded when it is asked for.

    The interpreter is held for one item at a time: other threads run between two of them.

    Raises:
        RefusedError: 400: it is no array, has over MESSAGES_MAX items, or an item is wrong.
    """
    for index, item in enumerate(raw_items(raw, where=where)):
        place = f"{where}[{index}]"
        yield place, decoded_at(item, decoder, where=place)


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
