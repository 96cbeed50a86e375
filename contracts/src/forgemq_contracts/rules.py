"""Rules that no schema can express: of bytes, of numbers, and of what may train.

Structs call these when they are made and when they are decoded, so a record that breaks a rule
does not decode and never reaches a reader. Each raises ValueError with the field and the rule.
"""

import math
import sys
from array import array
from collections.abc import Iterator
from typing import Any

import msgspec

ITEM_BYTES = 4
"""Token ids are int32, log-probabilities float32."""
EXPERT_BYTES = 2
"""Experts of a mixture are int16."""
INTEGER_MAX = 2**64 - 1
"""The largest integer of 64 bits."""


def check_items(field: str, data: bytes, *, count: int | None = None) -> int:
    """The number of 4-byte items in these bytes; it must be `count`, if given."""
    items, rest = divmod(len(data), ITEM_BYTES)
    if rest:
        raise ValueError(f"{field}: {len(data)} bytes are no array of {ITEM_BYTES}-byte items")
    if count is not None and items != count:
        raise ValueError(f"{field}: must have {count} items, has {items}")
    return items


def check_ids(field: str, data: bytes) -> int:
    """The number of token ids in these bytes; none may be negative."""
    count = check_items(field, data)
    # The sign is the top bit of each fourth byte, and ASCII bytes have none set. This is exact, and
    # needs no list of a million integers.
    if not data[ITEM_BYTES - 1 :: ITEM_BYTES].isascii():
        raise ValueError(f"{field}: a token id is negative")
    return count


def check_finite(field: str, data: bytes, *, count: int) -> None:
    """Refuse bytes that are not `count` finite float32."""
    check_items(field, data, count=count)
    values = array("f", data)
    if sys.byteorder == "big":
        values.byteswap()
    # A float64 sum of float32 cannot overflow, so it is finite exactly if all items are.
    if not math.isfinite(sum(values)):
        raise ValueError(f"{field}: an item is not finite")


def check_rows(field: str, data: bytes, *, count: int) -> None:
    """Refuse bytes that are not int16 in `count` rows of one length; no bytes are allowed."""
    if data and (not count or len(data) % (EXPERT_BYTES * count)):
        raise ValueError(f"{field}: {len(data)} bytes are no int16 array of {count} rows")


def check_routes(field: str, data: bytes, *, count: int) -> None:
    """As `check_rows`, and no expert may be negative."""
    check_rows(field, data, count=count)
    if not data[EXPERT_BYTES - 1 :: EXPERT_BYTES].isascii():  # The sign, as in `check_ids`.
        raise ValueError(f"{field}: an expert is negative")


def check_number(field: str, value: float) -> None:
    """Refuse infinities and NaN."""
    if not math.isfinite(value):
        raise ValueError(f"{field}: must be finite, got {value}")


def check_numbers(record: msgspec.Struct) -> None:
    """Refuse infinities, NaN and integers above 2^64 - 1 anywhere in a record, by dotted path.

    JSON has neither infinity nor NaN: written there each would be `null`, which reads as no number
    or as none given. Neither msgspec's MessagePack nor a seed of PyTorch holds a larger integer.

    Raises:
        ValueError: names the field and the value.
    """
    for path, value in _numbers(msgspec.to_builtins(record)):
        field = path.removeprefix(".")
        if not isinstance(value, int):
            check_number(field, value)
        elif value > INTEGER_MAX:
            raise ValueError(f"{field}: must be at most 2^64 - 1, got {value}")


def _numbers(value: object, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, float | int):
        yield path, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _numbers(part, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _numbers(part, f"{path}.{index}")


def check_json(field: str, data: bytes) -> None:
    """Refuse bytes that are not one JSON document; its values are not built."""
    _check_document(_ANY, field, data, kind="JSON document")


def check_json_objects(field: str, data: bytes) -> None:
    """Refuse bytes that are not one JSON array of objects whose values Python can hold."""
    _check_document(_OBJECTS, field, data, kind="JSON array of objects")


def check_json_object(field: str, data: bytes) -> None:
    """Refuse bytes that are not one JSON object; its values are not built."""
    _check_document(_OBJECT, field, data, kind="JSON object")


def check_trainable(purpose: str, *, source: str) -> None:
    """Refuse to train what has no loss: an advantage compares the rollouts of one task.

    Whether an import trains, the domain says; only the gateway, which has it, can refuse one.

    Raises:
        ValueError: Names the field and the rule.
    """
    if source == "live" and purpose == "train":
        raise ValueError(
            "purpose: must be eval if source is live: a recorded conversation is alone in its "
            "group, and an advantage compares the rollouts of a group"
        )


def _check_document(
    decoder: "msgspec.json.Decoder[object]", field: str, data: bytes, *, kind: str
) -> None:
    try:
        data.decode()  # msgspec checks UTF-8 only in values that it builds
        decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{field}: no {kind}: {error}") from error


_ANY: "msgspec.json.Decoder[object]" = msgspec.json.Decoder(msgspec.Raw)
_OBJECTS: "msgspec.json.Decoder[object]" = msgspec.json.Decoder(list[dict[str, Any]])
_OBJECT: "msgspec.json.Decoder[object]" = msgspec.json.Decoder(dict[str, msgspec.Raw])
