"""Which constraints of a JSON Schema the engine's grammar does not enforce.

XGrammar 0.2.7 ignores them without a word; SGLang checks the same list for schemas that it is given
as such.
"""

from collections.abc import Iterator, Mapping
from typing import Any

_IGNORED = frozenset(
    {
        "contains",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "multipleOf",
        "not",
        "then",
        "uniqueItems",
    }
)
_STRING_FORMATS = frozenset(
    {
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "json-pointer",
        "relative-json-pointer",
        "time",
        "uri",
        "uri-reference",
        "uri-template",
        "uuid",
    }
)
# Of these, one string can have one.
_OF_STRINGS = ("format", "pattern", "minLength", "maxLength")
_NAMED_SCHEMAS = frozenset({"$defs", "definitions", "patternProperties", "properties"})
_VALUES = frozenset({"const", "default", "enum", "examples"})


def unenforced(schema: Mapping[str, Any]) -> str | None:
    """The first keyword, at any depth, that would be ignored; None if all are enforced."""
    for part in _parts(schema):
        ignored = sorted(_IGNORED.intersection(part))
        if ignored:
            return ignored[0]
        named = part.get("format")
        if isinstance(named, str) and named not in _STRING_FORMATS:
            return f"format {named!r}"
        kinds = {"length" if name.endswith("Length") else name for name in _OF_STRINGS} & {
            "length" if name.endswith("Length") else name for name in part
        }
        if len(kinds) > 1:
            return " with ".join(sorted(kinds))
    return None


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:  # noqa: ANN401 - JSON
    """The schema and the schemas in it; not the values that it quotes."""
    if isinstance(schema, list):
        for each in schema:
            yield from _parts(each)
    if not isinstance(schema, Mapping):
        return
    yield schema
    for keyword, value in schema.items():
        if keyword in _NAMED_SCHEMAS and isinstance(value, Mapping):
            yield from _parts(list(value.values()))
        elif keyword not in _VALUES:
            yield from _parts(value)
