"""Durable folders: written beside their place, synced, then renamed into it."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

HASHED_BYTES_AT_ONCE = 1 << 20


class FolderInUseError(Exception):
    """Another process on this machine holds the folder."""


@contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """Nobody else holds the folder meanwhile; the kernel ends it with the process, however it dies.

    Raises:
        FolderInUseError: somebody does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FolderInUseError(f"another process holds {folder}; end it first") from error
        yield


def write_folder(place: Path, fill: Callable[[Path], None]) -> None:
    """Make `place` hold exactly what `fill` writes; after a crash it is whole or not there.

    An older folder at the place is replaced.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.with_name(f".{place.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    fill(draft)
    for path in sorted(draft.rglob("*")):
        _sync(path)
    _sync(draft)
    remove_folder(place)
    draft.rename(place)
    _sync(place.parent)


def remove_folder(place: Path) -> None:
    """Remove a folder so that no crash leaves half of it under its name."""
    if not place.exists():
        return
    gone = place.with_name(f".{place.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    place.rename(gone)
    shutil.rmtree(gone)


def link_or_copy(source: Path, target: Path) -> None:
    """The same bytes at `target`; without using space twice where the file system can."""
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, lower-case hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(HASHED_BYTES_AT_ONCE):
            digest.update(block)
    return digest.hexdigest()


def forget_cached(path: Path) -> None:
    """Let the next read of a synced file come from the disk, where the system can do so."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
