"""Bodies and queries of requests as structs, for FastAPI; a bad field is refused by its name."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from fastapi import Request
from msgspec import Struct, inspect

from forgemq_contracts.admin import BODY_BYTES_MAX
from forgemq_contracts.half_pairs import without_halves
from forgemq_gateway.core.errors import RefusedError, field_of, invalid
from forgemq_gateway.wire import read_body
from forgemq_settings.fixed_words import fixed_words

Input = TypeVar("Input", bound=Struct)

# A number that is out of range has 200 digits in a row or an exponent of three: looked for with
# each digit written as 0, which takes a fifth of the time that it takes to build all values.
_PLAIN = bytes.maketrans(b"123456789E", b"000000000e")
_LARGE = (b"e000", b"e+000", b"0" * 200)


def body_of(kind: type[Input]) -> Callable[[Request], Awaitable[Input]]:
    """A dependency that reads the body as this struct; an empty body is an empty object.

    The dependency raises RefusedError: 400 naming the field and its rule, 413.
    """

    async def read(request: Request) -> Input:
        data = await read_body(request.receive, bytes_max=BODY_BYTES_MAX, headers=request.headers)
        try:
            data.decode()  # The decoder takes a Raw field as it is, valid UTF-8 or not.
            given = msgspec.json.decode(without_halves(data) or b"{}", type=kind)
        except msgspec.ValidationError as error:
            raise _refused(error, kind) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise invalid(f"the body is not valid JSON: {error}", param=None) from error
        for name in given.__struct_fields__:
            value = getattr(given, name)
            if isinstance(value, msgspec.Raw):
                _check_numbers(value, field=name)
        return given

    return read


def query_of(kind: type[Input]) -> Callable[[Request], Awaitable[Input]]:
    """A dependency that reads the query as this struct.

    The dependency raises RefusedError: 400 naming the parameter and its rule.
    """

    async def read(request: Request) -> Input:
        try:
            return msgspec.convert(dict(request.query_params), kind, strict=False)
        except msgspec.ValidationError as error:
            raise _refused(error, kind) from error

    return read


def _check_numbers(value: msgspec.Raw, *, field: str) -> None:
    """Refuse a value that agents and graders could not decode; the decoder took it as it is.

    Raises:
        RefusedError: 400 naming the field and its rule.
    """
    data = bytes(value)
    plain = data.translate(_PLAIN)
    if not any(mark in plain for mark in _LARGE):
        return
    try:
        msgspec.json.decode(data)
    except msgspec.ValidationError as error:
        rule = "a number must fit in 64 bits as a float, or have at most 4300 digits"
        raise invalid(f"{field}: {rule}: {error}", param=field) from error


def _refused(error: msgspec.ValidationError, kind: type[Struct]) -> RefusedError:
    param = field_of(error)
    # The decoder names the word that is wrong; this adds those that are right.
    words = [
        word
        for field in msgspec.structs.fields(kind)
        if field.name == param
        for word in fixed_words(inspect.type_info(field.type))
    ]
    rule = f"; must be one of {', '.join(words)}" if words else ""
    return invalid(f"{error}{rule}", param=param)
