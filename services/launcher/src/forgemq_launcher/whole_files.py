"""Writes files that a reader, or a start after a full disk, finds as they were or whole."""

import os
from pathlib import Path

import msgspec

_MODE = 0o666
"""Of a new file, less what the process's umask forbids, as `open` does it."""


def write_whole(path: Path, content: bytes, *, mode: int = _MODE) -> None:
    """Write a file beside the old one, and then in its place."""
    draft = path.with_name(f"{path.name}.draft")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(content)
    draft.replace(path)


def write_json(path: Path, value: object) -> None:
    """Write a value for people and programs to read."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
