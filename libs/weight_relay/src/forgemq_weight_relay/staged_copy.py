"""A version's files in a folder, whole or while they arrive: one thread writes, others read on."""

import threading
from collections.abc import Mapping
from pathlib import Path

from forgemq_weight_relay.records import RelayedFile, RelayError


class StagedCopy:
    """Files that lie one after another, as a stream of bytes of which a first part is there.

    Lifecycle: `grow` while bytes arrive, then `complete` or `break_off`. Example: of 100 bytes 40
    have arrived: `wait_beyond(40)` blocks until there are more, then returns how many there are.
    """

    def __init__(self, paths: Mapping[str, Path], files: tuple[RelayedFile, ...]) -> None:
        """Begin without bytes; nothing is written or read here.

        Args:
            paths: Where each file is or will be, by its name.
            files: In the order of their bytes.
        """
        self.paths = paths
        self.files = files
        self.size_bytes = sum(file.size_bytes for file in files)
        self._there_bytes = 0
        self._is_whole = False
        self._broken = ""
        self._changed = threading.Condition()

    @classmethod
    def of_files(cls, paths: Mapping[str, Path], files: tuple[RelayedFile, ...]) -> "StagedCopy":
        """A copy whose files are all there already, each at its path by name."""
        copy = cls(paths, files)
        copy.grow(copy.size_bytes)
        copy.complete()
        return copy

    @property
    def broken(self) -> str:
        """Why no more bytes come; "" while they may."""
        return self._broken

    def sha256_of(self, name: str) -> str | None:
        """The announced checksum of a file; None if the copy has no such file."""
        return next((file.sha256 for file in self.files if file.name == name), None)

    def grow(self, count: int) -> None:
        """Note that so many more bytes are there."""
        with self._changed:
            self._there_bytes += count
            self._changed.notify_all()

    def complete(self) -> None:
        """Note that every byte is there and checked."""
        with self._changed:
            self._is_whole = not self._broken
            self._changed.notify_all()

    def break_off(self, reason: str) -> None:
        """Note that no more bytes come; `wait_beyond` raises the reason."""
        with self._changed:
            if not self._is_whole:
                self._broken = reason
            self._changed.notify_all()

    def wait_beyond(self, position: int, *, timeout_s: float) -> int:
        """Wait until more than `position` bytes are there; returns how many are.

        Raises:
            RelayError: the copy broke off, or nothing came in time.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._broken or self._there_bytes > position, timeout=timeout_s
            )
            if self._broken:
                raise RelayError(self._broken)
            if self._there_bytes <= position:
                raise RelayError(f"no byte after {position} within {timeout_s:.1f} s")
            return self._there_bytes
