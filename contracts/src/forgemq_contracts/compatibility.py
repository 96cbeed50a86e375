"""Which changes of the contracts leave old services and stored records readable.

Within a major only new structs, new topics and new fields with defaults are allowed. Everything
else needs a new topic, because during a rollout both versions read and write the same log.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from forgemq_contracts import topics

Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""JSON Schema of each struct by name, as `schemas()` returns it."""

_PROSE = frozenset({"description", "title"})
_BOUNDS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "pattern"})
_BOUNDS |= {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}

_RENAMED: Mapping[str, str] = {"Log": "LogLayout"}
"""Released struct names -> present ones. A struct's name is not on the wire, only its fields'."""


def schemas(*, ref_template: str = "#/$defs/{name}") -> dict[str, dict[str, Any]]:
    """JSON Schema of every struct that a topic carries, by name, sorted."""
    return schemas_of([topic.record for topic in topics.ALL], ref_template=ref_template)


def schemas_of(
    records: Sequence[type[msgspec.Struct]], *, ref_template: str = "#/$defs/{name}"
) -> dict[str, dict[str, Any]]:
    """JSON Schema of these structs and of all that they hold, by name, sorted."""
    _, components = msgspec.json.schema_components(records, ref_template=ref_template)
    # Through JSON once: defaults then have the same form as in a released file.
    plain = msgspec.json.decode(msgspec.json.encode(components), type=dict[str, dict[str, Any]])
    return dict(sorted(plain.items()))


def topic_facts() -> dict[str, dict[str, Any]]:
    """What readers and writers of each topic rely on, besides its schema."""
    return {
        topic.name: {
            "record": topic.record.__name__,
            "key": topic.key,
            "partitioned_by": topic.partitioned_by,
            "is_transactional": topic.is_transactional,
        }
        for topic in sorted(topics.ALL, key=lambda topic: topic.name)
    }


def renamed(released: Schemas) -> Schemas:
    """Released schemas under the present names of their structs."""
    text = msgspec.json.encode(released).decode()
    for before, after in _RENAMED.items():
        text = text.replace(f'"#/$defs/{before}"', f'"#/$defs/{after}"')
    schemas = msgspec.json.decode(text, type=dict[str, dict[str, Any]])
    return {_RENAMED.get(name, name): schema for name, schema in schemas.items()}


def breaking_changes(old: Schemas, new: Schemas) -> list[str]:
    """Name every change of a struct that breaks a deployed reader or a stored record."""
    return [problem for name in old for problem in _struct_problems(name, old, new)]


def breaking_topic_changes(old: Schemas, new: Schemas) -> list[str]:
    """Name every change of a topic that breaks a deployed service or a stored log."""
    removed = [f"{name}: removed or renamed" for name in old if name not in new]
    return removed + [
        f"{name}: {fact} was {value!r}, is {new[name].get(fact)!r}"
        for name in old
        if name in new
        for fact, value in old[name].items()
        if new[name].get(fact) != value
    ]


def added_fields(old: Schemas, new: Schemas) -> list[str]:
    """Fields, as `Struct.field`, that a struct of both has in the new schemas alone; sorted."""
    return sorted(
        f"{name}.{field}"
        for name in old.keys() & new.keys()
        for field in new[name].get("properties", {}).keys() - old[name].get("properties", {}).keys()
    )


def is_settings(schema: Mapping[str, Any]) -> bool:
    """Whether it is a struct of the run file, which refuses fields that it does not know."""
    return schema.get("additionalProperties") is False


def keeps(before: object, after: object) -> bool:
    """Whether a value in wire form still means what it meant.

    Structs in it may have new fields: these have their defaults, which is also what an old record
    without them means.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        return all(name in after and keeps(value, after[name]) for name, value in before.items())
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(keeps, before, after))
    return before == after


def _struct_problems(name: str, old: Schemas, new: Schemas) -> Iterator[str]:
    if name not in new:
        yield f"{name}: removed"
        return
    before, after = old[name], new[name]
    fields_before, fields_after = before.get("properties", {}), after.get("properties", {})
    required_before, required_after = set(before["required"]), set(after["required"])
    # Only launchers write a run file, and a reader that does not know a value of it refuses the run
    # by name: such a struct may take more than before.
    may_widen = is_settings(after)
    for field, was in fields_before.items():
        if field not in fields_after:
            yield f"{name}.{field}: removed or renamed"
            continue
        is_now = fields_after[field]
        if not _is_same_type(_wire_type(was), _wire_type(is_now), may_widen=may_widen):
            yield f"{name}.{field}: type changed"
        if field in required_before:
            if field not in required_after and not may_widen:
                yield f"{name}.{field}: required changed"
        elif field in required_after:
            yield f"{name}.{field}: required changed"
        elif not keeps(_default(was, old), _default(is_now, new)):
            # Defaults are left out on the wire: a new one gives stored records a new meaning.
            yield f"{name}.{field}: default changed"
    for field in sorted(required_after - set(fields_before)):
        yield f"{name}.{field}: added without a default"


def _is_same_type(before: object, after: object, *, may_widen: bool) -> bool:
    if before == after or not may_widen:
        return before == after
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return False
    kept = {key: value for key, value in before.items() if key in after or key not in _BOUNDS}
    return kept == after


def _default(field: Mapping[str, Any], schemas: Schemas) -> object:
    """The default of a field; one that is a struct with all of the struct's fields."""
    default, name = field.get("default"), str(field.get("$ref", "")).rpartition("/")[2]
    if not isinstance(default, dict) or name not in schemas:
        return default
    fields = schemas[name].get("properties", {})
    # What the default says of a field comes before the field's own default.
    said = {
        each: {**field, **({"default": default[each]} if each in default else {})}
        for each, field in fields.items()
    }
    return {each: _default(field, schemas) for each, field in said.items()}


def _wire_type(schema: object) -> object:
    """The schema without its default, and without descriptions at any depth."""
    if isinstance(schema, dict):
        kept = {key: value for key, value in schema.items() if key not in _PROSE | {"default"}}
        return {key: _wire_type(value) for key, value in kept.items()}
    if isinstance(schema, list):
        return [_wire_type(item) for item in schema]
    return schema
