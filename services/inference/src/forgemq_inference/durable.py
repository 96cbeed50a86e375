"""The durable copy of published weights: its header, its checksum, a local folder with it.

The trainer writes it to `weights/<run>/<lineage>.<version>/` beside the run's blobs: in a local
folder (a volume that the engine mounts at the same path) it is loaded in place, from an object
store it is downloaded first. Of a delta only the file of what changed is downloaded, if the weights
that it changes are in the cache. Version 0 is the base model's own folder.
"""

import asyncio
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias

import fsspec

from forgemq_bus.blobs import store_errors
from forgemq_contracts.weight_buckets import TensorSpec, header_bytes, tensor_specs
from forgemq_contracts.weights import PublishedHead, PublishedWeights
from forgemq_weight_deltas import DeltaError, patch

Published: TypeAlias = PublishedWeights | PublishedHead
"""What has a durable copy."""

WEIGHTS_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
_SHA256 = re.compile("[0-9a-f]{64}")
_HEADER_START_BYTES = 8
"""A safetensors file begins with its header's length, a 64-bit integer."""
_PARTIAL = ".partial"
"""Ends the name of a copy that is not whole yet."""
_COPIES_KEPT = 2
"""The newest, and the one before it, which the engine may still be reading."""


class DurableCopyError(Exception):
    """The copy is missing, not readable, or not the bytes that were published."""


class DurableCopies:
    """Reads published folders; remote ones are downloaded into a cache that keeps the newest two.

    Example: `await DurableCopies(Path("cache")).folder(published)` gives a local folder.
    """

    def __init__(self, cache: Path) -> None:
        """Note the cache folder, which nobody else uses; a download makes it."""
        self._cache = cache
        self._verified_sha256 = ""
        # A download whose caller was cancelled goes on in its thread; the next one waits for it.
        self._one_at_a_time = threading.Lock()

    async def tensors(self, published: Published) -> tuple[TensorSpec, ...]:
        """Names, dtypes and shapes of the weights, sorted by name.

        Raises:
            DurableCopyError: there is no readable file.
        """
        return await asyncio.to_thread(_tensors, published.uri)

    async def folder(self, published: Published) -> Path:
        """A local folder with the published bytes, checked against their sha256.

        Raises:
            DurableCopyError: the copy is gone, or other bytes.
        """
        return await asyncio.to_thread(self._folder, published)

    def _folder(self, published: Published) -> Path:
        with self._one_at_a_time:
            return self._found_folder(published)

    def _found_folder(self, published: Published) -> Path:
        for left in self._cache.glob(f"*{_PARTIAL}"):  # By a process that was killed.
            shutil.rmtree(left, ignore_errors=True)
        with _translated(published.uri):
            if isinstance(published, PublishedWeights) and published.deltas:
                return self._patched(published)
            return self._whole(published.uri, published.sha256)

    def _whole(self, uri: str, sha256: str) -> Path:
        """A folder that has all of its weights at this address."""
        filesystem, path = fsspec.core.url_to_fs(uri)
        if "file" in filesystem.protocol:
            return self._checked(Path(path), sha256)

        def download(partial: Path) -> None:
            filesystem.invalidate_cache(path)
            for file in filesystem.ls(path, detail=False):
                filesystem.get_file(file, str(partial / Path(file).name))

        return self._cached(sha256, download)

    def _patched(self, published: PublishedWeights) -> Path:
        """A folder made of the newest weights in the cache, else of the whole ones, and deltas."""
        base_sha256 = str(published.base_sha256)
        if published.sha256 == base_sha256:  # A skipped step changes nothing.
            return self._whole(published.uri, base_sha256)
        folders = [self._cache / base_sha256]
        folders += [self._cache / delta.sha256 for delta in published.deltas]

        def make(partial: Path) -> None:
            # A machine that lost its power may have kept a folder and not what was in it.
            there = [(folder / WEIGHTS_FILE).is_file() for folder in folders]
            known = [number for number, is_there in enumerate(there) if is_there]
            first = known[-1] if known else 0
            start = folders[first] if known else self._whole(published.uri, base_sha256)
            shutil.copytree(start, partial, dirs_exist_ok=True)
            for delta in published.deltas[first:]:
                _patch(partial / WEIGHTS_FILE, delta.uri)

        try:
            return self._cached(published.sha256, make)
        except DurableCopyError:
            # What it was made of may be damaged: the next attempt downloads it.
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _cached(self, sha256: str, make: Callable[[Path], None]) -> Path:
        """The folder of these weights in the cache, made if it is not there."""
        target = self._cache / sha256
        # A machine that lost its power may have kept the name of a copy and not its bytes.
        with suppress(DurableCopyError, FileNotFoundError):
            os.utime(target)
            return self._checked(target, sha256)
        shutil.rmtree(target, ignore_errors=True)
        partial = self._cache / f"{sha256}{_PARTIAL}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        make(partial)
        # Before the rename: broken weights in the cache would be used again and again.
        self._checked(partial, sha256).rename(target)
        os.utime(target)  # A copy that was made of another one has the other's time.
        self._remove_oldest()
        return target

    def _checked(self, folder: Path, sha256: str) -> Path:
        if self._verified_sha256 != sha256:
            _verify(_tensors_file(folder), sha256)
            self._verified_sha256 = sha256
        return folder

    def _remove_oldest(self) -> None:
        complete = [each for each in self._cache.iterdir() if _SHA256.fullmatch(each.name)]
        complete.sort(key=lambda folder: folder.stat().st_mtime_ns)
        for folder in complete[:-_COPIES_KEPT]:
            shutil.rmtree(folder, ignore_errors=True)


class Copies(NamedTuple):
    """The durable copies of both; each keeps its own newest two."""

    policies: DurableCopies
    heads: DurableCopies


def copies_in(cache: Path, *, lane: int) -> Copies:
    """Copies that are downloaded into a lane's own folder of a cache, those of heads below it.

    Lanes of one machine may share a cache. They are at different versions: each deletes what it
    does not need any more.
    """
    own = cache / f"lane-{lane}"
    return Copies(DurableCopies(own), DurableCopies(own / "heads"))


async def file_sha256(path: Path) -> str | None:
    """Checksum of a file; None if there is no such file."""
    try:
        return await asyncio.to_thread(_sha256, path)
    except FileNotFoundError:
        return None


@contextmanager
def _translated(uri: str, *more: type[Exception]) -> Iterator[None]:
    """Raise DurableCopyError for what the store at this address raises, and for `more`."""
    errors = store_errors(fsspec.core.url_to_fs(uri)[0])
    try:
        yield
    except (*errors, *more) as error:
        raise DurableCopyError(f"{uri}: {error}") from error


def _tensors(uri: str) -> tuple[TensorSpec, ...]:
    path = f"{uri.rstrip('/')}/{WEIGHTS_FILE}"
    with _translated(uri, ValueError), fsspec.open(path, "rb") as file:
        start = file.read(_HEADER_START_BYTES)
        return tensor_specs(start + file.read(header_bytes(start) - len(start)))


def _tensors_file(folder: Path) -> Path:
    adapter = folder / ADAPTER_FILE
    return adapter if adapter.exists() else folder / WEIGHTS_FILE


def _patch(weights: Path, delta_uri: str) -> None:
    try:
        with fsspec.open(delta_uri, "rb") as file:
            patch(weights, file)
    except DeltaError as error:
        raise DurableCopyError(f"{delta_uri}: {error}") from error


def _verify(path: Path, expected_sha256: str) -> None:
    found = _sha256(path)
    if found != expected_sha256:
        raise DurableCopyError(f"{path} has sha256 {found}, published was {expected_sha256}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
