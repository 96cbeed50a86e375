"""Where a run's file has which keys, so that a wrong key is refused with the one that was meant."""

import difflib
from collections.abc import Iterator
from functools import cache

from msgspec import inspect

from forgemq_contracts.run import RunConfiguration
from forgemq_settings.fixed_words import alternatives

_SUGGESTED_MAX = 3
"""Places of one name; a name that is in more is no typing error of one of them."""


def meant(key: str) -> str:
    """`; did you mean ...?` for a key that does not exist, or "" if none is near.

    Args:
        key: Dotted, with the number or the domain of an element: `queues.0.slot`.
    """
    *parents, field = key.split(".")
    beside = [name for kind in _at(parents) for name in _names(kind)]
    near = (
        _placed(field)
        or difflib.get_close_matches(field, beside, n=1)
        or _placed(next(iter(difflib.get_close_matches(field, _places(), n=1)), ""))
    )
    if not near or len(near) > _SUGGESTED_MAX:
        return ""
    return f"; did you mean {' or '.join(near)}?"


def unknown_key(values: object) -> str:
    """The first key of a document whose table has no such key, dotted; "" if there is none."""
    return next(_unknown(inspect.type_info(RunConfiguration), values, ""), "")


def kinds_of(key: str) -> list[inspect.Type]:
    """The types that the value of a key may have; [] if there is no such key."""
    return _at(key.split("."))


def _at(parts: list[str]) -> list[inspect.Type]:
    kinds = [inspect.type_info(RunConfiguration)]
    for part in parts:
        kinds = [
            inner for kind in kinds for each in alternatives(kind) for inner in _in(each, part)
        ]
    return [each for kind in kinds for each in alternatives(kind)]


def _in(kind: inspect.Type, part: str) -> list[inspect.Type]:
    """The type of the field, or of the element, of this name; [] if there is none."""
    if isinstance(kind, inspect.StructType):
        return [each.type for each in kind.fields if each.encode_name == part]
    return [kind.item_type] if isinstance(kind, inspect.VarTupleType) else []


def _unknown(kind: inspect.Type, value: object, key: str) -> Iterator[str]:
    for each in alternatives(kind):
        if isinstance(each, inspect.StructType) and isinstance(value, dict):
            types = {field.encode_name: field.type for field in each.fields}
            for name, inner in value.items():
                dotted = f"{key}.{name}".removeprefix(".")
                if name not in types:
                    yield dotted
                else:
                    yield from _unknown(types[name], inner, dotted)
        elif isinstance(each, inspect.VarTupleType) and isinstance(value, list | tuple):
            for number, inner in enumerate(value):
                yield from _unknown(each.item_type, inner, f"{key}.{number}")


def _names(kind: inspect.Type) -> list[str]:
    if isinstance(kind, inspect.StructType):
        return [each.encode_name for each in kind.fields]
    return []


@cache
def _places() -> dict[str, list[str]]:
    """Every name of a key, and the dotted keys that end in it."""
    found: dict[str, list[str]] = {}
    for key in _below(inspect.type_info(RunConfiguration), ""):
        found.setdefault(key.rpartition(".")[2], []).append(key)
    return found


def _placed(name: str) -> list[str]:
    """Where keys of this name belong; [] if there is none."""
    return [
        key if "." in key else f"{key} at the top of the file" for key in _places().get(name, ())
    ]


def _below(kind: inspect.Type, key: str) -> Iterator[str]:
    for each in alternatives(kind):
        if isinstance(each, inspect.VarTupleType):
            yield from _below(each.item_type, f"{key}.N")
        elif isinstance(each, inspect.StructType):
            for field in each.fields:
                inner = f"{key}.{field.encode_name}".removeprefix(".")
                yield inner
                yield from _below(field.type, inner)
