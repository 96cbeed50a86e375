"""Folders that a crash leaves whole or absent: written under another name, then renamed.

A folder that is synced before it is renamed also outlives a crash of the machine.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_LOCK = ".lock"


class FolderInUseError(Exception):
    """Another process on this machine holds the folder."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock the folder against other processes inside this context.

    The kernel releases the lock when the process ends, however it ends.

    Raises:
        FolderInUseError: another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FolderInUseError(f"another process holds {folder}; end it first") from error
        yield


def is_lock_there(folder: Path) -> bool:
    """Whether this is a folder that was locked, and not the empty one below its mount point."""
    return (folder / _LOCK).exists()


def write_folder(folder: Path, fill: Callable[[Path], None], *, is_synced: bool = True) -> None:
    """Make `folder` hold exactly what `fill` writes; after a crash it is whole or absent.

    Replaces an older folder of that name. Nothing stays of one whose writing fails, as on a full
    disk; a killed process leaves it to `remove_leftovers`.

    Args:
        folder: To write.
        fill: Writes the files into an empty folder.
        is_synced: Also after a crash of the machine; False leaves that to `sync_folder`.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    with ExitStack() as failed:
        failed.callback(shutil.rmtree, draft, ignore_errors=True)
        draft.mkdir()
        fill(draft)
        # Before the rename: a crash of the machine may otherwise leave a folder of the right name
        # with empty files in it.
        if is_synced:
            _sync_files(draft)
        failed.pop_all()
    remove_folder(folder)
    draft.rename(folder)
    if is_synced:
        sync_file(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make a folder that was written without a sync outlive a crash of the machine."""
    _sync_files(folder)
    sync_file(folder.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder so that no crash leaves half of it under its name."""
    if not folder.exists():
        return
    gone = folder.with_name(f".{folder.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone)


def remove_leftovers(root: Path) -> None:
    """Remove what a killed process left of folders that it was writing or removing here."""
    for pattern in (".*.draft", ".*.gone", ".*.delta"):
        for path in root.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def link_or_copy(source: Path, target: Path) -> None:
    """Put the bytes of `source` at `target`: a hard link, or a copy across file systems."""
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, lower-case hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def forget_cached(path: Path) -> None:
    """Drop a synced file from the page cache, if the system can, so that a read checks the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _sync_files(folder: Path) -> None:
    """Sync the files, then the folder that names them."""
    for path in sorted(folder.rglob("*")):
        sync_file(path)
    sync_file(folder)


def sync_file(path: Path) -> None:
    """Make a file, or a folder's list of files, outlive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
