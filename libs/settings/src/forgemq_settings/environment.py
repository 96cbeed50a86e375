"""Parses the settings of a process, one frozen struct, from its environment."""

import math
from collections.abc import Mapping
from typing import TypeVar

import msgspec
import msgspec.inspect

from forgemq_settings.fixed_words import alternatives, fixed_words

Settings = TypeVar("Settings", bound=msgspec.Struct)


class SettingsError(ValueError):
    """An environment variable is unknown, is missing, or has a value that its rule refuses."""


def parse(kind: type[Settings], *, prefix: str, environ: Mapping[str, str]) -> Settings:
    """Parse the variables `<prefix><FIELD>`; a field without one takes its default.

    Sequences are comma-separated. An error never repeats free text or a number: it may be secret.

    Raises:
        SettingsError: names the variable and the rule.
    """
    fields = {prefix + field.name.upper(): field for field in msgspec.structs.fields(kind)}
    unknown = sorted(name for name in environ if name.startswith(prefix) and name not in fields)
    if unknown:
        raise SettingsError(f"{unknown[0]}: no such setting; there are {', '.join(sorted(fields))}")
    values = {}
    for name, field in fields.items():
        if name in environ:
            values[field.name] = _value(name, environ[name], field.type)
        elif field.required:
            raise SettingsError(f"{name}: must be set")
    return kind(**values)


def _value(name: str, text: str, kind: object) -> object:
    given = [part.strip() for part in text.split(",") if part.strip()] if _is_list(kind) else text
    try:
        value: object = msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{name}: {error}{_choice(kind)}") from error
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingsError(f"{name}: must be a finite number")
    return value


def _choice(kind: object) -> str:
    """What the error of a setting with a few fixed values leaves out."""
    words = fixed_words(msgspec.inspect.type_info(kind))
    return f"; must be one of {', '.join(words)}" if words else ""


def _is_list(kind: object) -> bool:
    of_many = msgspec.inspect.CollectionType | msgspec.inspect.TupleType
    return any(isinstance(each, of_many) for each in alternatives(msgspec.inspect.type_info(kind)))
