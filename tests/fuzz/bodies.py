"""Request bodies that are wrong somewhere, each made from its number alone."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from tests.fuzz.sound import changed, paths

_WORDS = [
    "",
    "assistant",
    "tool",
    "king",
    "auto",
    "function",
    "c1",
    "x\ud800",
    "\x00",
    "find",
    "-1",
]
_NAMES = ["role", "content", "type", "function", "name", "id", "text", "input", "x", "$ref"]
_FIELDS = [
    "n",
    "top_logprobs",
    "logprobs",
    "stream",
    "stream_options",
    "seed",
    "response_format",
    "text",
    "reasoning",
    "thinking",
    "stop",
    "metadata",
    "previous_response_id",
    "parallel_tool_calls",
    "x",
]
_NUMBERS = [0, 1, -1, 2**31, 2**63, -(2**70), 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf")]
_LONG = [100, 3_000, 70_000]
_DEPTHS = [20, 500, 5_000]


def fuzzed(random: Random, sound: dict[str, Any]) -> bytes:
    """The sound body with something wrong in it: a value, a field, or bytes of its text."""
    body = json.dumps(random.choice(_SPOILS)(random, sound))
    if random.random() < 0.02:
        body = body.replace('"hello"', _nested(random))
    encoded = body.encode()
    return encoded if random.random() < 0.7 else _torn(random, encoded)


def junk(random: Random, *, depth: int = 0) -> Any:
    """A JSON value that nobody asked for."""
    kind = random.randrange(7 if depth < 3 else 5)
    match kind:
        case 0:
            return random.choice([None, True, False])
        case 1:
            return random.choice(_NUMBERS)
        case 2 | 3:
            return random.choice(_WORDS)
        case 4:
            return "long " * (random.choice(_LONG) // 5 if random.random() < 0.05 else 3)
        case 5:
            return [junk(random, depth=depth + 1) for _ in range(random.randrange(4))]
    names = random.sample(_NAMES, random.randrange(4))
    return {name: junk(random, depth=depth + 1) for name in names}


def _value(random: Random, sound: dict[str, Any]) -> Any:
    return changed(sound, random.choice(list(paths(sound))[1:]), junk(random))


def _field(random: Random, sound: dict[str, Any]) -> Any:
    return {**sound, random.choice(_FIELDS): junk(random)}


def _without(random: Random, sound: dict[str, Any]) -> Any:
    name = random.choice(list(sound))
    return {key: value for key, value in sound.items() if key != name}


def _twice(random: Random, sound: dict[str, Any]) -> Any:
    """A list of the body with one of its items repeated, or all of them the other way round."""
    lists = [(path, each) for path in paths(sound) if isinstance(each := _at(sound, path), list)]
    if not lists:
        return _value(random, sound)
    path, items = random.choice(lists)
    at = random.randrange(len(items) + 1)
    order = [*items[:at], *items[max(at - 1, 0) :]] if random.random() < 0.7 else items[::-1]
    return changed(sound, path, order)


def _swapped(random: Random, sound: dict[str, Any]) -> Any:
    """The value of one place at another one."""
    places = list(paths(sound))[1:]
    return changed(sound, random.choice(places), _at(sound, random.choice(places)))


_SPOILS: list[Callable[[Random, dict[str, Any]], Any]] = [
    _value,
    _value,
    _value,
    _field,
    _without,
    _twice,
    _swapped,
]


def _nested(random: Random) -> str:
    """JSON so deep that Python's own encoder would not write it."""
    depth = random.choice(_DEPTHS)
    opened, closed = random.choice([("[", "]"), ('{"x":', "}")])
    return opened * depth + "1" + closed * depth


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for each in path:
        value = value[each]
    return value


def _torn(random: Random, body: bytes) -> bytes:
    """The text with some bytes replaced, removed, repeated, or cut off."""
    at = random.randrange(len(body))
    to = min(len(body), at + random.randrange(1, 40))
    match random.randrange(5):
        case 0:
            return body[:at] + random.randbytes(random.randrange(1, 4)) + body[at + 1 :]
        case 1:
            return body[:at] + body[to:]
        case 2:
            return body[:to] + body[at:]
        case 3:
            return body[:at]
    return random.randbytes(random.randrange(60))
