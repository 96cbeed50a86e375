"""The columns of a file of episodes, and its rows as Arrow holds them.

A message is a struct of the fields that chat templates read; `rest` is a JSON object of all that
these columns cannot hold as it is (a content of several parts, a null, a field of a client's own),
so that a message comes back equal.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]  # has no stubs

from forgemq_contracts.arrays import pack_floats, pack_ids, unpack_floats, unpack_ids
from forgemq_contracts.recorded_turns import RecordedTurn
from forgemq_episode_files.conversation import Message
from forgemq_episode_files.rows import EpisodeRow

_TEXTS = ("role", "content", "reasoning_content", "tool_call_id")

MESSAGE = pa.struct(
    [
        *((name, pa.string()) for name in _TEXTS),
        (
            "tool_calls",
            pa.list_(
                pa.struct(
                    [
                        ("id", pa.string()),
                        ("type", pa.string()),
                        (
                            "function",
                            pa.struct([("name", pa.string()), ("arguments", pa.string())]),
                        ),
                    ]
                )
            ),
        ),
        ("rest", pa.string()),
    ]
)
TURN = pa.struct(
    [
        ("completion_id", pa.string()),
        ("sequence", pa.int64()),
        ("parent_id", pa.string()),
        ("shared_prefix_tokens", pa.int64()),
        ("is_fork", pa.bool_()),
        ("fork_reason", pa.string()),
        ("counts", pa.bool_()),
        ("messages", pa.list_(MESSAGE)),
        ("reply", MESSAGE),
        ("tools", pa.string()),
        ("context_ids", pa.list_(pa.int32())),
        ("output_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        ("temperature", pa.float64()),
        ("support", pa.string()),
        ("finish_reason", pa.string()),
        ("process", pa.float64()),
        ("return_to_go", pa.float64()),
        ("advantage", pa.float64()),
        ("cuts", pa.string()),
    ]
)
SCHEMA = pa.schema(
    [
        ("run", pa.string()),
        ("group_id", pa.string()),
        ("episode_id", pa.string()),
        ("domain", pa.string()),
        ("purpose", pa.string()),
        ("source", pa.string()),
        ("round_name", pa.string()),
        ("messages", pa.list_(MESSAGE)),
        ("tools", pa.string()),
        ("outcome", pa.float64()),
        ("speed", pa.float64()),
        ("process", pa.float64()),
        ("total", pa.float64()),
        ("rewards", pa.list_(pa.struct([("name", pa.string()), ("value", pa.float64())]))),
        ("is_masked", pa.bool_()),
        ("status", pa.string()),
        ("truncated_by", pa.string()),
        ("detail", pa.string()),
        ("not_trainable", pa.string()),
        ("fork_reasons", pa.list_(pa.struct([("reason", pa.string()), ("count", pa.int64())]))),
        ("metrics", pa.list_(pa.struct([("name", pa.string()), ("value", pa.float64())]))),
        ("task", pa.string()),
        ("result", pa.string()),
        ("metadata", pa.string()),
        ("turns", pa.list_(TURN)),
    ]
)
"""`tools`, `cuts`, `task`, `result` and `metadata` are JSON: their values have no common form."""

_ARRAYS: dict[str, tuple[Callable[[bytes], list[Any]], Callable[[Any], bytes]]] = {
    "context_ids": (unpack_ids, pack_ids),
    "output_ids": (unpack_ids, pack_ids),
    "logprobs": (unpack_floats, pack_floats),
    "versions": (unpack_ids, pack_ids),
}


class RowError(ValueError):
    """A row is no episode; the text names the field and the rule."""


def to_arrow(row: EpisodeRow) -> dict[str, Any]:
    """The row as Python values of the columns' types."""
    values = msgspec.structs.asdict(row)
    return {
        **values,
        "messages": [_message_columns(each) for each in row.messages],
        "tools": _json(row.tools),
        "rewards": msgspec.to_builtins(row.rewards),
        "metrics": msgspec.to_builtins(row.metrics),
        "fork_reasons": msgspec.to_builtins(row.fork_reasons),
        "turns": [_turn_columns(each) for each in row.turns],
    }


def from_arrow(values: Mapping[str, Any]) -> EpisodeRow:
    """The row of these values, which have the columns' types; any of them may be null.

    Raises:
        RowError: names the field and the rule that it breaks.
    """
    turns = [
        _turn_of(each, field=f"turns[{index}]")
        for index, each in enumerate(_items(values, "turns", field="turns"))
    ]
    made = {
        **values,
        "messages": _messages_of(values, "messages", field="messages"),
        "tools": _objects(values["tools"], field="tools"),
    }
    made.pop("turns")
    try:
        row = msgspec.convert({**made, "turns": ()}, EpisodeRow)
    except msgspec.ValidationError as error:
        raise RowError(named(error)) from error
    for name in ("outcome", "speed", "process", "total"):
        if not math.isfinite(values[name] or 0.0):
            raise RowError(f"{name}: must be finite, got {values[name]}")
    for name in ("task", "result"):
        _check_json(values[name], Any, field=name)
    _check_json(values["metadata"], dict[str, Any] | None, field="metadata")
    return msgspec.structs.replace(row, turns=tuple(turns))


def named(error: msgspec.ValidationError, *, within: str = "") -> str:
    """The rule behind the path of the field, without the decoder's `$`."""
    rule, _, path = str(error).partition(" - at `$")
    field = f"{within}{path.rstrip('`')}".lstrip(".")
    return f"{field}: {rule}" if field else rule


def _message_columns(message: Message) -> dict[str, Any]:
    columns = {name: message[name] for name in _TEXTS if isinstance(message.get(name), str)}
    if _are_calls(message.get("tool_calls")):
        columns["tool_calls"] = message["tool_calls"]
    rest = {name: value for name, value in message.items() if name not in columns}
    return {**columns, "rest": msgspec.json.encode(rest).decode() if rest else None}


def _are_calls(value: object) -> bool:
    """Whether the column of calls holds exactly these."""
    try:
        # A list, as the message has: a tuple equals none.
        calls = msgspec.convert(value, list[_Call])
    except msgspec.ValidationError:
        return False
    return bool(msgspec.to_builtins(calls) == value)


class _Function(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct):
    id: str
    type: str
    function: _Function


def _turn_columns(turn: RecordedTurn) -> dict[str, Any]:
    values = msgspec.structs.asdict(turn)
    arrays = {name: unpack(values[name]) for name, (unpack, _) in _ARRAYS.items()}
    return {
        **values,
        **arrays,
        "messages": [_message_columns(each) for each in turn.messages],
        "reply": _message_columns(turn.reply),
        "tools": _json(turn.tools),
        "cuts": msgspec.json.encode(turn.cuts).decode(),
    }


def _turn_of(values: Any, *, field: str) -> RecordedTurn:  # noqa: ANN401 - a row's value
    if values is None:
        raise RowError(f"{field}: must not be null")
    made = {
        **values,
        "messages": _messages_of(values, "messages", field=f"{field}.messages"),
        "reply": _message_of(values["reply"], field=f"{field}.reply"),
        "tools": _objects(values["tools"], field=f"{field}.tools"),
        "cuts": _objects(values.get("cuts"), field=f"{field}.cuts"),
    }
    for name, (_, pack) in _ARRAYS.items():
        items = _items(values, name, field=f"{field}.{name}")
        if None in items:
            raise RowError(f"{field}.{name}: item {items.index(None)} must not be null")
        made[name] = pack(items)
    try:
        return msgspec.convert(made, RecordedTurn)
    except msgspec.ValidationError as error:
        raise RowError(named(error, within=field)) from error


def _messages_of(values: Mapping[str, Any], name: str, *, field: str) -> list[Message]:
    items = _items(values, name, field=field)
    return [_message_of(each, field=f"{field}[{index}]") for index, each in enumerate(items)]


def _message_of(columns: Any, *, field: str) -> Message:  # noqa: ANN401 - a row's value
    if columns is None:
        raise RowError(f"{field}: must not be null")
    rest = columns["rest"]
    held = {k: v for k, v in columns.items() if k != "rest" and v is not None}
    if rest is None:
        return held
    try:
        return {**held, **msgspec.json.decode(rest, type=dict[str, Any])}
    except (msgspec.DecodeError, RecursionError) as error:
        raise RowError(f"{field}.rest: no JSON object: {error}") from error


def _items(values: Mapping[str, Any], name: str, *, field: str) -> Sequence[Any]:
    items = values[name]
    if items is None:
        raise RowError(f"{field}: must not be null")
    return items  # type: ignore[no-any-return]  # the column's type is a list


def _objects(text: str | None, *, field: str) -> tuple[Message, ...]:
    try:
        return msgspec.json.decode(text or "[]", type=tuple[Message, ...])
    except (msgspec.DecodeError, RecursionError) as error:
        raise RowError(f"{field}: no JSON array of objects: {error}") from error


def _check_json(text: str | None, kind: Any, *, field: str) -> None:  # noqa: ANN401 - any type
    try:
        msgspec.json.decode("null" if text is None else text, type=kind)
    except msgspec.ValidationError as error:
        raise RowError(f"{field}: {error}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise RowError(f"{field}: no JSON: {error}") from error


def _json(values: Sequence[Message]) -> str:
    return msgspec.json.encode(values).decode()
