"""A disk of a few hundred megabytes in memory, which can be filled and freed again."""

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

_CHUNK_BYTES = 4 * 2**20


class SmallDisk:
    """A mounted folder; what fills it is one file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        """Take all that is left, to the last page."""
        zeros = bytes(_CHUNK_BYTES)
        with self._filler.open("wb", buffering=0) as file:
            try:
                while file.write(zeros):
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def free(self) -> None:
        """Give back what `fill` took."""
        self._filler.unlink(missing_ok=True)

    def left_bytes(self) -> int:
        """What others can still write."""
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize


@contextlib.contextmanager
def small_disk(folder: Path, *, size_bytes: int, group: int) -> Iterator[SmallDisk]:
    """A small disk on this folder until the block ends; this group may write. Needs root."""
    folder.mkdir()
    options = f"size={size_bytes},mode=2775,gid={group}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        yield SmallDisk(folder)
    finally:
        # A container's mount of it may go a moment later.
        subprocess.run(["umount", "--lazy", folder], check=True)
