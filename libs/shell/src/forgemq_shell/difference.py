"""A difference in words: its position and field, and both records decoded."""

from collections.abc import Iterator, Sequence

import msgspec

from forgemq_contracts import topics
from forgemq_shell.comparison import Difference

BYTES_SHOWN_MAX = 24
"""Of a bytes field: tells token arrays apart and fits a line."""

TEXT_SHOWN_CHARACTERS_MAX = 1500
"""Of one record: about twenty lines of a terminal."""


def difference_lines(difference: Difference) -> Sequence[str]:
    """Lines to print: position and field, then the record on the log and the replayed one."""
    batch = f"batch {difference.sequence}"
    if difference.place is None:
        return (f"differs in {batch}: {difference.detail}",)
    topic, written, replayed = difference.place.topic, difference.written, difference.replayed
    on_log = None if written is None else _decoded(topic, written.value)
    again = None if replayed is None else _decoded(topic, replayed.value)
    at = str(difference.place) if written is None else written.where
    if written is None or replayed is None:
        does = "does not write this record" if replayed is None else "adds a record"
        position = f"first difference at {at} ({batch}): the replay {does}"
    else:
        fields = next(_paths(on_log, again), "the key" if on_log == again else "the bytes")
        position = f"first difference at {at} ({batch}) in {fields}"
    return (position, f"on the log: {_shown(on_log)}", f"replayed:   {_shown(again)}")


def _decoded(topic: str, value: bytes) -> object:
    """Fields by name; the first bytes if the record does not decode, as a dead letter."""
    if topic not in topics.BY_NAME:
        return _short(value)
    try:
        record = topics.decode(topics.BY_NAME[topic], value)
    except msgspec.ValidationError:
        return _short(value)
    return msgspec.to_builtins(record, builtin_types=(bytes,))


def _paths(left: object, right: object, at: str = "") -> Iterator[str]:
    """Every field that differs, with both values, in the order of the record."""
    if isinstance(left, dict) and isinstance(right, dict):
        for name in (*left, *(name for name in right if name not in left)):
            yield from _paths(left.get(name), right.get(name), f"{at}.{name}" if at else str(name))
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        if len(left) != len(right):
            yield f"{at} ({len(left)} on the log, {len(right)} replayed)"
        for number, (a, b) in enumerate(zip(left, right, strict=False)):
            yield from _paths(a, b, f"{at}.{number}")
    elif left != right:
        yield f"{at} ({_shown(left)} on the log, {_shown(right)} replayed)"


def _shown(value: object) -> str:
    if value is None:
        return "no such record"
    text = msgspec.json.encode(_without_bytes(value)).decode()
    return (
        text if len(text) <= TEXT_SHOWN_CHARACTERS_MAX else f"{text[:TEXT_SHOWN_CHARACTERS_MAX]}..."
    )


def _without_bytes(value: object) -> object:
    if isinstance(value, bytes):
        return _short(value)
    if isinstance(value, dict):
        return {name: _without_bytes(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_bytes(item) for item in value]
    return value


def _short(value: bytes) -> str:
    shown = value[:BYTES_SHOWN_MAX].hex()
    return shown if len(value) <= BYTES_SHOWN_MAX else f"{shown}... ({len(value)} bytes)"
