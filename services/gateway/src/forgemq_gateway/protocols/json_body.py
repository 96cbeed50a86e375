"""What all protocols share in reading a JSON body: its fields, its tools, its refusals."""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from forgemq_gateway.core.errors import field_of, invalid
from forgemq_gateway.core.requests import TOOLS_BYTES_MAX

Fields = TypeVar("Fields")

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
    instructions: Raw = Raw()
    tools: Raw = Raw()


_LONG = msgspec.json.Decoder(LongFields)
_RAW = msgspec.json.Decoder(dict[str, Raw])
_EACH = msgspec.json.Decoder(list[Raw])
_TOOL = msgspec.json.Decoder(dict[str, Any])


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
        _check_size(_LONG.decode(body), body_bytes=len(body))
        raw = _RAW.decode(body)
        for name, bytes_max in (("tools", TOOLS_BYTES_MAX), *limits.items()):
            if len(memoryview(raw.get(name, Raw()))) > bytes_max:
                raise invalid(f"{name} must have at most {bytes_max} bytes", param=name)
        return raw, decoder.decode(body)
    except msgspec.ValidationError as error:
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


def tools_in(raw: Raw) -> list[dict[str, Any]]:
    """The tools as the client sent them.

    Raises:
        RefusedError: 400: an integer of over 64 bits, or nested too deep.
    """
    # One by one: other threads run between two of them.
    return [_tool(tool, index=index) for index, tool in enumerate(_EACH.decode(raw))]


def _tool(raw: Raw, *, index: int) -> dict[str, Any]:
    try:
        return _TOOL.decode(raw)
    except msgspec.DecodeError as error:
        raise invalid(f"tools: {error}", param=f"tools[{index}]{field_of(error) or ''}") from error
    except RecursionError as error:
        raise invalid(f"tools are nested too deep: {error}", param=f"tools[{index}]") from error
