"""Reads what the launcher needs of a model's config.json, as files of many families have it."""

from typing import TypeVar

import msgspec

Fields = TypeVar("Fields", bound=msgspec.Struct)


def fields_of(config: bytes, wanted: type[Fields]) -> Fields:
    """The fields that `wanted` names; one that is null is as if it were left out.

    Raises:
        ValueError: a field is of another type, which it names, or these bytes are no object.
    """
    try:
        found = msgspec.json.decode(config, type=dict[str, object])
        given = {name: value for name, value in found.items() if value is not None}
        return msgspec.convert(given, wanted)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the model's config.json: {error}") from error
