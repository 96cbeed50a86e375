"""One small and one full record of every topic, made from the structs' own rules.

Their bytes are stored beside the contracts and never changed: what was written once must always
decode.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect

_Record = TypeVar("_Record", bound=msgspec.Struct)

# A text for each pattern that the contracts use; a new pattern needs a row.
_MATCHING = {
    r"^[a-z0-9-]{1,64}$": "g-0123456789abcdef",
    r"^[a-z0-9-]{1,64}\.[0-9]+\.[0-9]+$": "g-0123456789abcdef.2.1",
    r"^[0-9a-f]{32}$": "0123456789abcdef0123456789abcdef",
    r"^[a-z0-9_]{1,40}$": "shop_desk",
    r"^[0-9a-f]{64}$": "0123456789abcdef" * 4,
    r"^[a-z0-9-]{1,40}$": "demo-7",
    r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*)?$": "shop_desk.rewards:outcome",
    r"^(success_band|age|hardest_first|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$": "success_band",
    r"^(https?://[^\s/]+(/[^\s]*)?)?$": "http://127.0.0.1:30000",
    r"^https?://[^\s/]+(/[^\s]*)?$": "http://127.0.0.1:30000",
}

# Fields that a rule binds to a document or to other fields of the record.
_BOUND: dict[tuple[str, str], object] = {
    ("RequestedGroup", "task"): b"{}",
    ("AdmittedGroup", "task"): b"{}",
    ("TurnPart", "tools"): b"[{}]",
    ("TurnPart", "messages"): b"[{}]",
    ("TurnPart", "asked"): b"{}",
    ("Constraint", "structural_tag"): "{}",
    ("WeightSpan", "start"): 0,
    ("WeightSpan", "end"): 1,
    ("RequestedCompletion", "context"): b"\x01\x00\x00\x00" * 3,
    ("RequestedCompletion", "shared_prefix_tokens"): 3,
    ("MergedTree", "sample_first_entry"): b"\x00\x00\x00\x00",
}
# If all fields are set there is one item in each array, one sample and one entry.
_BOUND_FULL: dict[tuple[str, str], object] = {
    ("RequestedGroup", "purpose"): "eval",
    ("ContextCut", "parameters"): {"exchanges": 3},
    ("MergedTree", "sample_first_entry"): b"\x00\x00\x00\x00\x01\x00\x00\x00",
    ("PublishedWeights", "is_durable"): False,
}


def minimal(record: type[_Record]) -> _Record:
    """A record with its required fields only, at the lowest values allowed."""
    return cast("_Record", _struct(inspect.type_info(record), is_full=False))


def full(record: type[_Record]) -> _Record:
    """A record with every field set, and not to its default if there is a choice."""
    return cast("_Record", _struct(inspect.type_info(record), is_full=True))


def _struct(described: inspect.Type, *, is_full: bool) -> Any:  # noqa: ANN401 - a struct
    assert isinstance(described, inspect.StructType)
    bound = _BOUND | _BOUND_FULL if is_full else _BOUND
    values = {
        field.name: bound[described.cls.__name__, field.name]
        if (described.cls.__name__, field.name) in bound
        else _other_choice(field) or _value(field.type, is_full=is_full)
        for field in described.fields
        if field.required or is_full
    }
    return msgspec.convert(
        {
            name: msgspec.to_builtins(value, builtin_types=(bytes,))
            for name, value in values.items()
        },
        described.cls,
    )


def _other_choice(field: inspect.Field) -> str | int | None:
    """A choice other than the field's default, so that it is on the wire."""
    described = field.type
    while isinstance(described, inspect.Metadata):
        described = described.type
    if not isinstance(described, inspect.LiteralType):
        return None
    return next(value for value in described.values if value != field.default)


def _value(described: inspect.Type, *, is_full: bool) -> object:
    while isinstance(described, inspect.Metadata):
        described = described.type
    if isinstance(described, inspect.StructType):
        return _struct(described, is_full=is_full)
    if isinstance(described, inspect.UnionType):
        return _value(_not_none(described), is_full=is_full)
    if isinstance(described, inspect.VarTupleType):
        count = max(described.min_length or 0, int(is_full))
        return tuple(_value(described.item_type, is_full=is_full) for _ in range(count))
    return _SCALARS[type(described)](described, is_full)


def _not_none(union: inspect.UnionType) -> inspect.Type:
    return next(kind for kind in union.types if not isinstance(kind, inspect.NoneType))


def _integer(described: Any, is_full: bool) -> int:  # noqa: ANN401 - see _SCALARS
    low = described.ge if described.ge is not None else (described.gt or 0)
    return int(low) if not is_full else min(int(low) + 3, described.le or 1_000_000)


def _number(described: Any, is_full: bool) -> float:  # noqa: ANN401
    if described.gt is None and described.ge is not None and not is_full:
        return float(described.ge)
    return 0.75 if is_full else 0.5


def _text(described: Any, is_full: bool) -> str:  # noqa: ANN401, ARG001
    return "text" if described.pattern is None else _MATCHING[described.pattern]


_SCALARS: dict[type[inspect.Type], Callable[[Any, bool], object]] = {
    inspect.IntType: _integer,
    inspect.FloatType: _number,
    inspect.StrType: _text,
    inspect.BoolType: lambda _, is_full: is_full,
    inspect.BytesType: lambda _, is_full: b"\x01\x00\x00\x00" if is_full else b"",
    inspect.LiteralType: lambda described, _: described.values[0],
}
