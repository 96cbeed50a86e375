"""Digests by which two messages, paths or bodies count as the same.

Two messages match if role, text and tool calls agree: a list of text blocks is its joined text,
null is the empty text, and arguments are compared as JSON values. Cache marks, refusals, provider
fields and reasoning are left out, because clients change or drop them between requests, or write
the reasoning in front of the text.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

DIGEST_BYTES = 16
"""128 bits: among the messages of a run no two different ones share a digest."""

_THINK, _THINK_END = "<think>", "</think>"

# Longer arguments match by their text alone: to read their JSON would hold the interpreter.
_CANONICAL_CHARACTERS_MAX = 65_536

# The path before the first message.
EMPTY_PATH = b""


def digest_of(data: bytes) -> str:
    """Digest of bytes, 32 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def message_digest(
    role: str,
    text: str,
    *,
    tool_calls: Iterable[tuple[str, str, str]] = (),
    tool_call_id: str = "",
) -> str:
    """Match key of one message.

    Args:
        role: `developer` counts as `system`.
        text: All its text.
        tool_calls: Id, name and arguments (JSON text) of each call.
        tool_call_id: Id of the call that a tool's result answers.
    """
    head = "system" if role == "developer" else role
    if role == "assistant":
        text = parted_reasoning(text)[1].strip()  # Several clients trim what they echo.
    told = f"{head}\0{tool_call_id}\0".encode() + text.encode("utf-8", "surrogatepass")
    hasher = hashlib.blake2b(told, digest_size=DIGEST_BYTES)
    for call_id, name, arguments in tool_calls:
        hasher.update(f"\0{call_id}\0{name}\0".encode("utf-8", "surrogatepass"))
        hasher.update(canonical_json(arguments))
    return hasher.hexdigest()


def parted_reasoning(text: str) -> tuple[str, str]:
    """The reasoning that an assistant's text begins with, and the text behind it."""
    head = text.lstrip()
    if not head.startswith(_THINK):
        return "", text
    reasoning, end, rest = head.removeprefix(_THINK).partition(_THINK_END)
    return (reasoning, rest) if end else ("", text)


def canonical_json(text: str) -> bytes:
    """The same bytes for JSON texts of equal value; other or long text is encoded as it is."""
    if len(text) > _CANONICAL_CHARACTERS_MAX:
        return text.encode("utf-8", "surrogatepass")
    try:
        return msgspec.json.encode(_whole_numbers(msgspec.json.decode(text)), order="deterministic")
    except (msgspec.DecodeError, ValueError, RecursionError):
        return text.encode("utf-8", "surrogatepass")


def _whole_numbers(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """The value with 1.0 as 1: JavaScript has one kind of number, and writes it so."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_whole_numbers(each) for each in value]
        case dict():
            return {name: _whole_numbers(each) for name, each in value.items()}
    return value


def path_after(path: bytes, key: str) -> bytes:
    """Digest of a message path and the message behind it."""
    return hashlib.blake2b(path + key.encode(), digest_size=DIGEST_BYTES).digest()


def body_digest(protocol: str, digests: Iterable[str], fields: Mapping[str, bytes]) -> str:
    """Digest of a whole request, its messages by match key.

    Args:
        protocol: The API it came through.
        digests: Match keys of the messages, in order.
        fields: Every other field that decides the answer, as raw JSON; not how it is delivered.
            All but the tools are compared as JSON values: codex writes the keys of its
            `client_metadata` in another order when it sends a body again.
    """
    head = protocol + "".join(digests)
    hasher = hashlib.blake2b(head.encode(), digest_size=DIGEST_BYTES)
    for name in sorted(fields):
        hasher.update(f"\0{name}\0".encode())
        value = fields[name]
        hasher.update(value if name == "tools" else canonical_json(value.decode()))
    return hasher.hexdigest()
