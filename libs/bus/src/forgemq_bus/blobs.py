"""Content-addressed payloads in a local folder or an object store, by their sha256.

A blob never changes, so writing it again is free and a half-written one is never seen: a local
file appears by rename after fsync, an object store's put is atomic by itself.
"""

import asyncio
import hashlib
import os
import tempfile
from pathlib import Path, PurePosixPath

import fsspec

from forgemq_bus.errors import BlobError, LostBlobError
from forgemq_contracts.fields import BlobReference


class BlobStore:
    """The blobs of one run.

    A reference is resolved by its sha256 below this store's own root: a run that was moved or
    copied with its blobs stays readable.

    Example:
        `reference = await BlobStore("/data/blobs/run-7").put(b"...")`.
    """

    def __init__(self, uri: str) -> None:
        """A store at an fsspec address: a folder, `file://...`, `s3://bucket/prefix`."""
        self._filesystem, root = fsspec.core.url_to_fs(uri)
        self._root = PurePosixPath(root)
        self._is_local = "file" in self._filesystem.protocol
        self.uri = uri.rstrip("/")

    async def put(self, data: bytes) -> BlobReference:
        """Store the bytes durably; returns where they are.

        Raises:
            BlobError: the store refuses or does not answer.
        """
        return await asyncio.to_thread(self._put, data)

    async def get(self, reference: BlobReference) -> bytes:
        """The bytes, verified against their sha256.

        Raises:
            LostBlobError: they are gone, or not the bytes that were written.
            BlobError: the store does not answer.
        """
        return await asyncio.to_thread(self._get, reference)

    def _put(self, data: bytes) -> BlobReference:
        sha256 = hashlib.sha256(data).hexdigest()
        path = self._path(sha256)
        try:
            if self._is_local:
                _write_local(Path(path), data)
            else:
                self._filesystem.pipe_file(path, data)
        except OSError as error:
            raise BlobError(f"cannot write {path}: {error}") from error
        uri = f"{self.uri}/{sha256[:2]}/{sha256}"
        return BlobReference(uri=uri, sha256=sha256, size_bytes=len(data))

    def _get(self, reference: BlobReference) -> bytes:
        path = self._path(reference.sha256)
        try:
            data: bytes = self._filesystem.cat_file(path)
        except FileNotFoundError as error:
            raise LostBlobError(f"cannot read {path}: {error}") from error
        except OSError as error:
            raise BlobError(f"cannot read {path}: {error}") from error
        found = hashlib.sha256(data).hexdigest()
        if found != reference.sha256:
            raise LostBlobError(f"{path} holds {len(data)} bytes with sha256 {found}")
        return data

    def _path(self, sha256: str) -> str:
        return str(self._root / sha256[:2] / sha256)


def _write_local(path: Path, data: bytes) -> None:
    if path.exists() and path.stat().st_size == len(data):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # A temporary file is private; readers may run as another user.
        Path(temporary).chmod(0o644)
        Path(temporary).rename(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
