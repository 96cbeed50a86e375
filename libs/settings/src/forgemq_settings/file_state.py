"""What of a file says that it has other content."""

from pathlib import Path
from typing import TypeAlias

FileState: TypeAlias = tuple[int, int, int] | None
"""Inode, size and time of the last change, which another content does not all leave as they are;
None if the file is not there."""


def file_state(path: Path) -> FileState:
    """The state of a file now; of a link, that of the file it leads to."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
