"""Values too large for a record, in a local folder or an object store, by their sha256.

    <address>/values/<run>/<minute of the write>/<sha256>

A folder that is not mounted must not be taken for an empty store. So `make_folder` makes the folder
of the run when the run is announced, and no write makes it again.

The same bytes written in another minute are another blob. So a minute that is over gets no blob
any more, and what no record points at can be deleted from it without a lock: no writer can be
about to rely on it. `list_minutes`, `list_blobs` and `delete` are for that sweep alone.
"""

import asyncio
import calendar
import contextlib
import hashlib
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import fsspec

from forgemq_bus.errors import BlobError, LostBlobError
from forgemq_contracts.fields import BlobReference

PUT_AGE_S_MAX = 600.0
"""A blob that was put so long ago gets no record any more, since a sweep may delete it. Above what
a slow store takes for the values of one commit, and far below the grace of a sweep, an hour."""

_MINUTE = "%Y%m%d-%H%M"
_MINUTE_NAME = re.compile(r"[0-9]{8}-[0-9]{4}")


class BlobFile(NamedTuple):
    """One file of a minute: a blob, or what a writer left that was killed."""

    name: str
    size_bytes: int


class BlobStore:
    """The blobs of one run.

    A reference is resolved by minute and sha256 below this store's own address: a run that was
    moved or copied with its blobs stays readable.

    Example:
        `reference = await BlobStore("s3://bucket/blobs", run="run-7").put(b"...")`.
    """

    def __init__(
        self,
        uri: str,
        *,
        run: str,
        has_folder: bool = False,
        clock_s: Callable[[], float] | None = None,
    ) -> None:
        """A store at an fsspec address, which several runs may share.

        Args:
            uri: A folder, `file://...`, `s3://bucket/prefix`.
            run: Only blobs of this run are found here.
            has_folder: `make_folder` has made the run's folder; also true once this store has
                written or read a blob. Without the folder a write is refused then.
            clock_s: Seconds since the Unix epoch; by default this machine's clock.
        """
        self._filesystem, root = fsspec.core.url_to_fs(uri)
        self._root = PurePosixPath(root, "values", run)
        self._is_local = "file" in self._filesystem.protocol
        self._errors = store_errors(self._filesystem)
        self._has_folder = has_folder and self._is_local
        self._clock_s = clock_s or _wall_clock_s
        self.uri = uri.rstrip("/")
        self._uri = f"{self.uri}/values/{run}"

    async def make_folder(self, *, makes_address: bool) -> bool:
        """Make the folder of a new run, with the rights of the address.

        Args:
            makes_address: Make the address too. If False, the folder is made only if that can be
                done here: this machine need not be one that reaches the blobs.

        Returns:
            Whether the run has a folder; False in an object store, which has none.

        Raises:
            BlobError: the folder cannot be made.
        """
        return await asyncio.to_thread(self._make_folder, makes_address)

    async def check_folder(self) -> None:
        """Return if the run's folder is there, or need not be.

        Raises:
            BlobError: it was made and is not there.
        """
        if self._has_folder:
            await asyncio.to_thread(self._check_there)

    async def put(self, data: bytes) -> BlobReference:
        """Store the bytes durably; returns where they are.

        Raises:
            BlobError: the store refuses, does not answer, or is not there.
        """
        return await asyncio.to_thread(self._put, data)

    async def get(self, reference: BlobReference) -> bytes:
        """The bytes, verified against their sha256.

        Raises:
            LostBlobError: they are gone, or not the bytes that were written.
            BlobError: the store does not answer, or is not there.
        """
        return await asyncio.to_thread(self._get, reference)

    def check_fresh(self, reference: BlobReference) -> None:
        """Return if a record may still be written that points at this blob, which `put` returned.

        Raises:
            BlobError: the process stood still, or the store was slow; put it again.
        """
        name = blob_name(reference)
        age_s = self._clock_s() - _start_of(name.partition("/")[0])
        if age_s > PUT_AGE_S_MAX:
            raise BlobError(
                f"{name} was put {age_s:.0f} s ago, and a blob without a record may be deleted "
                f"after {PUT_AGE_S_MAX:.0f} s"
            )

    async def list_minutes(self) -> list[str]:
        """Minutes in which blobs were written, oldest first.

        Raises:
            BlobError: the store does not answer.
        """
        found = await asyncio.to_thread(self._list, self._root)
        return sorted(file.name for file in found if _MINUTE_NAME.fullmatch(file.name))

    async def list_blobs(self, minute: str) -> list[BlobFile]:
        """Every file of the minute.

        Raises:
            BlobError: the store does not answer.
        """
        return await asyncio.to_thread(self._list, self._root / minute)

    async def delete(self, minute: str, names: Sequence[str]) -> None:
        """Delete files of a minute that is over, and its folder once that is empty.

        Raises:
            BlobError: the store refuses or does not answer; some may be gone already.
        """
        await asyncio.to_thread(self._delete, minute, names)

    async def delete_all(self) -> int:
        """Delete every blob of the run and the weights beside them; returns the number of bytes.

        For a run that is deleted: no process of it may be up.

        Raises:
            BlobError: the store refuses or does not answer; some may be gone already.
        """
        return await asyncio.to_thread(self._delete_all)

    def _make_folder(self, makes_address: bool) -> bool:
        address, folder = Path(self._root).parent.parent, Path(self._root)
        if not self._is_local:
            return False
        try:
            if makes_address:
                address.mkdir(parents=True, exist_ok=True)
            _make_like(address, folder.parent)
            _make_like(address, folder)
        except OSError as error:
            if not makes_address:
                return False
            raise BlobError(f"cannot make {folder}: {error}") from error
        return True

    def _put(self, data: bytes) -> BlobReference:
        sha256 = hashlib.sha256(data).hexdigest()
        minute = minute_of(self._clock_s())
        path = str(self._root / minute / sha256)
        try:
            if self._is_local:
                _write_local(Path(path), data, makes_parents=not self._has_folder)
            else:
                self._filesystem.pipe_file(path, data)
        except self._errors as error:
            if isinstance(error, FileNotFoundError):
                self._check_there()
            raise BlobError(f"cannot write {path}: {error}") from error
        self._has_folder = self._is_local
        uri = f"{self._uri}/{minute}/{sha256}"
        return BlobReference(uri=uri, sha256=sha256, size_bytes=len(data))

    def _get(self, reference: BlobReference) -> bytes:
        path = str(self._root / blob_name(reference))
        try:
            data: bytes = self._filesystem.cat_file(path)
        except FileNotFoundError as error:
            self._check_there()
            raise LostBlobError(f"cannot read {path}: {error}") from error
        except self._errors as error:
            raise BlobError(f"cannot read {path}: {error}") from error
        found = hashlib.sha256(data).hexdigest()
        if found != reference.sha256:
            raise LostBlobError(f"{path} holds {len(data)} bytes with sha256 {found}")
        self._has_folder = self._is_local
        return data

    def _check_there(self) -> None:
        """Raise BlobError if the store itself is missing: then no blob counts as lost.

        A folder that is not mounted has none of the run's blobs, and would fail every group.
        """
        # An object store has no folders: there it is the bucket.
        path = self._root if self._is_local else PurePosixPath(self._root.parts[0])
        try:
            is_there = self._filesystem.exists(str(path))
        except self._errors as error:
            raise BlobError(f"cannot look for {path}: {error}") from error
        if not is_there:
            raise BlobError(f"{path} does not exist: is the blob store of the run mounted?")

    def _list(self, folder: PurePosixPath) -> list[BlobFile]:
        try:
            # An object store's listing may be remembered from before the last writes.
            self._filesystem.invalidate_cache(str(folder))
            files = self._filesystem.ls(str(folder), detail=True)
        except FileNotFoundError:
            return []
        except self._errors as error:
            raise BlobError(f"cannot list {folder}: {error}") from error
        return [BlobFile(PurePosixPath(f["name"]).name, int(f["size"] or 0)) for f in files]

    def _delete(self, minute: str, names: Sequence[str]) -> None:
        folder = self._root / minute
        try:
            if names:
                self._filesystem.rm([str(folder / name) for name in names])
            if self._is_local and not any(Path(folder).iterdir()):
                Path(folder).rmdir()
        except FileNotFoundError:
            return  # Another process of the run deletes the same.
        except self._errors as error:
            raise BlobError(f"cannot delete from {folder}: {error}") from error

    def _delete_all(self) -> int:
        size_bytes = 0
        for kind in ("values", "weights"):
            folder = str(self._root.parent.parent / kind / self._root.name)
            try:
                self._filesystem.invalidate_cache(folder)
                if self._filesystem.exists(folder):
                    size_bytes += self._filesystem.du(folder)
                    self._filesystem.rm(folder, recursive=True)
            except self._errors as error:
                raise BlobError(f"cannot delete {folder}: {error}") from error
        return size_bytes


def store_errors(filesystem: fsspec.AbstractFileSystem) -> tuple[type[Exception], ...]:
    """What this kind of store raises if it refuses, does not answer, or breaks off an answer."""
    if "s3" not in filesystem.protocol:
        return (OSError,)
    # Of s3fs's own clients, which are there if such a store is: no sign-in or no connection, and a
    # body that ends too early.
    from aiohttp import ClientError
    from botocore.exceptions import BotoCoreError

    return (OSError, BotoCoreError, ClientError)


def store_refusals(filesystem: fsspec.AbstractFileSystem) -> tuple[type[Exception], ...]:
    """Those of `store_errors` that a later try meets as well: no sign-in, no right, no bucket."""
    refusals = (PermissionError, FileNotFoundError)
    if "s3" not in filesystem.protocol:
        return refusals
    from botocore.exceptions import NoCredentialsError

    return (*refusals, NoCredentialsError)


def minute_of(clock_s: float) -> str:
    """Name of the minute that this time lies in; names sort by time."""
    return time.strftime(_MINUTE, time.gmtime(clock_s))


def _start_of(minute: str) -> float:
    return calendar.timegm(time.strptime(minute, _MINUTE))


def blob_name(reference: BlobReference) -> str:
    """`<minute>/<sha256>` of the blob that a record points at.

    Raises:
        LostBlobError: the address does not name one.
    """
    path = PurePosixPath(reference.uri)
    if not _MINUTE_NAME.fullmatch(path.parent.name) or path.name != reference.sha256:
        raise LostBlobError(f"{reference.uri} names no blob")
    return f"{path.parent.name}/{path.name}"


def _wall_clock_s() -> float:
    return time.time_ns() / 1e9


def _make_like(address: Path, folder: Path) -> None:
    """Make a folder with the rights that the address gives: services may run as another user."""
    try:
        folder.mkdir()
    except FileExistsError:
        return
    given = address.stat()
    folder.chmod(stat.S_IMODE(given.st_mode))
    with contextlib.suppress(PermissionError):
        os.chown(folder, given.st_uid, given.st_gid)
    _sync_folder(folder.parent)


def _write_local(path: Path, data: bytes, *, makes_parents: bool) -> None:
    # A file appears by rename after fsync, so one of the right size is whole.
    if path.exists() and path.stat().st_size == len(data):
        return
    is_first = not path.parent.exists()
    path.parent.mkdir(parents=makes_parents, exist_ok=True)
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
        # Also on an interrupt: nothing else would ever delete the temporary file.
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)
    if is_first:
        _sync_folder(path.parent.parent)


def _sync_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
