"""The words that a value with a few fixed ones may have, which msgspec's errors leave out."""

from msgspec import inspect


def fixed_words(kind: inspect.Type) -> tuple[str, ...]:
    """The words, in order; () if the type has none."""
    literals = [each for each in alternatives(kind) if isinstance(each, inspect.LiteralType)]
    return tuple(str(word) for each in literals for word in each.values)


def alternatives(kind: inspect.Type) -> list[inspect.Type]:
    """The types that a value may have, without their bounds."""
    if isinstance(kind, inspect.Metadata):
        return alternatives(kind.type)
    if isinstance(kind, inspect.UnionType):
        return [each for option in kind.types for each in alternatives(option)]
    return [kind]
