"""Files of finished conversations: JSON lines, or Parquet files of `forgemq export`."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
from msgspec import Struct

from forgemq_agents.byte_order_mark import skip_mark
from forgemq_agents.core.conversations import LINE_BYTES_MAX, ConversationError, conversation_of
from forgemq_agents.errors import TaskFileError
from forgemq_contracts.half_pairs import without_halves

if TYPE_CHECKING:
    from forgemq_episode_files.rows import EpisodeRow

PARQUET = ".parquet"
_READ_BYTES_MAX = LINE_BYTES_MAX + len(b"\r\n")
"""Of a line. A file in another format may be one line of any length, which is never in memory."""
_ORIGIN = (
    "run",
    "group_id",
    "episode_id",
    "domain",
    "purpose",
    "source",
    "round_name",
    "status",
    "truncated_by",
    "detail",
    "not_trainable",
    "total",
)
"""Columns that say where an episode comes from; in the importing run it has its own."""


class FileEntry(Struct, frozen=True, kw_only=True):
    """One conversation of a file: its place for people, and its line, or why it has none."""

    place: str
    line: bytes
    fault: str = ""


def entries(path: Path) -> Iterator[FileEntry]:
    """Every conversation of a file, or of a folder of Parquet files by name.

    Raises:
        ConversationError: a Parquet file cannot be used; names it, the column and the rule.
        OSError: it cannot be read.
    """
    if not _is_parquet(path):
        yield from _lines(path)
        return
    for file in _parquet_files(path):
        yield from _rows(file)


def read_conversations(path: Path) -> list[Any]:
    """The conversations of a file, or of the files of a folder, as tasks of `supervised.play`.

    Raises:
        TaskFileError: naming the file, the line or row, the field and the rule.
    """
    found: list[Any] = []
    try:
        for entry in entries(path):
            if entry.fault:
                raise TaskFileError(f"{entry.place}: {entry.fault}")
            try:
                conversation_of(entry.line)
            except ConversationError as error:
                raise TaskFileError(f"{entry.place}: {error}") from error
            found.append(msgspec.json.decode(entry.line))
    except (ConversationError, OSError) as error:
        raise TaskFileError(str(error)) from error
    return found


def entry_count(path: Path) -> int:
    """How many entries there are, counted without reading what they say.

    Raises:
        ConversationError: as of `entries`, if a file is no Parquet file.
        OSError: it cannot be read.
    """
    if not _is_parquet(path):
        return sum(1 for _ in _lines(path))
    return sum(_row_count(file) for file in _parquet_files(path))


def _is_parquet(path: Path) -> bool:
    return path.is_dir() or path.suffix == PARQUET


def _parquet_files(path: Path) -> list[Path]:
    """The file itself, or the files of a folder by name; at least one."""
    files = sorted(path.glob(f"*{PARQUET}")) if path.is_dir() else [path]
    if not files:
        raise ConversationError(f"{path}: has no file that ends in {PARQUET}")
    return files


def _lines(path: Path) -> Iterator[FileEntry]:
    """The lines that are not blank, with their numbers from 1."""
    with path.open("rb") as file:
        skip_mark(file)
        for number, line in enumerate(iter(partial(_line, file), b""), start=1):
            if line.strip():
                whole = without_halves(line.rstrip(b"\r\n"))
                yield FileEntry(place=f"{path}:{number}", line=whole)


def _line(file: BinaryIO) -> bytes:
    """The next line, b"" at the end; of a line that is too long the beginning, too long itself."""
    line = rest = file.readline(_READ_BYTES_MAX)
    while len(rest) == _READ_BYTES_MAX and not rest.endswith(b"\n"):
        rest = file.readline(_READ_BYTES_MAX)
    return line


def _rows(path: Path) -> Iterator[FileEntry]:
    """The rows of a Parquet file, with their numbers from 0, as `datasets` has them."""
    with _told_as_conversations(path):
        from forgemq_episode_files.arrow_rows import RowError, from_arrow
        from forgemq_episode_files.reading import read_rows

        for number, values in enumerate(read_rows(path)):
            place = f"{path}, row {number}"
            try:
                yield FileEntry(place=place, line=line_of(from_arrow(values)))
            except RowError as error:
                yield FileEntry(place=place, line=b"", fault=str(error))


def _row_count(path: Path) -> int:
    with _told_as_conversations(path):
        from forgemq_episode_files.reading import row_count

        return row_count(path)


@contextmanager
def _told_as_conversations(path: Path) -> Iterator[None]:
    """Make an error of what reads Parquet, or that it is not installed, a ConversationError."""
    try:
        from forgemq_episode_files.reading import FileError
    except ImportError as error:
        raise ConversationError(
            f"{path}: Parquet needs forgemq-agents[parquet]: {error}"
        ) from error
    try:
        yield
    except FileError as error:
        raise ConversationError(str(error)) from error


def line_of(row: "EpisodeRow") -> bytes:
    """The line of JSON that says what this row says."""
    metadata = msgspec.json.decode(row.metadata) if row.metadata else {}
    origin: dict[str, Any] = {name: getattr(row, name) for name in _ORIGIN}
    if row.task is not None:
        origin["task"] = msgspec.Raw(row.task.encode())
    rewards = {each.name: each.value for each in row.rewards}
    rewards |= {} if row.speed is None else {"speed": row.speed}
    return msgspec.json.encode(
        {
            "messages": row.messages,
            **({"tools": row.tools} if row.tools else {}),
            "reward": row.outcome,
            "rewards": rewards,
            "result": None if row.result is None else msgspec.Raw(row.result.encode()),
            # An episode that was imported before keeps where it was played.
            "metadata": {"origin": origin, **metadata},
            **({"turns": row.turns} if row.turns else {}),
        }
    )
