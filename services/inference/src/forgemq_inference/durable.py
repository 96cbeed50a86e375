"""The durable copy of published weights: its header, its checksum, a local folder with it.

The trainer writes it to `weights/<run>/<lineage>.<version>/` beside the run's blobs: in a local
folder (a volume that the engine mounts at the same path) it is loaded in place, from an object
store it is downloaded first. Version 0 is the base model's own folder.
"""

import asyncio
import hashlib
import re
import shutil
from pathlib import Path
from typing import NamedTuple, TypeAlias

import fsspec

from forgemq_contracts.weight_buckets import TensorSpec, header_bytes, tensor_specs
from forgemq_contracts.weights import PublishedHead, PublishedWeights

Published: TypeAlias = PublishedWeights | PublishedHead
"""What has a durable copy."""

WEIGHTS_FILE = "model.safetensors"
_SHA256 = re.compile("[0-9a-f]{64}")
_CHUNK_BYTES = 8 * 2**20
"""Read at once for a checksum: large enough for the disk's full speed."""
_HEADER_START_BYTES = 8
"""A safetensors file begins with its header's length, a 64-bit integer."""
_COPIES_KEPT = 2
"""The newest, and the one before it, which the engine may still be reading."""


class DurableCopyError(Exception):
    """The copy is missing, not readable, or not the bytes that were published."""


class DurableCopies:
    """Reads published folders; remote ones are downloaded into a cache that keeps the newest two.

    Example: `await DurableCopies(Path("cache")).folder(published)` gives a local folder.
    """

    def __init__(self, cache: Path) -> None:
        """Note the cache folder; it is made when a remote copy is downloaded."""
        self._cache = cache
        self._verified_sha256 = ""

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
        filesystem, path = fsspec.core.url_to_fs(published.uri)
        try:
            if "file" in filesystem.protocol:
                folder = Path(path)
            else:
                folder = self._download(filesystem, path, published.sha256)
            if self._verified_sha256 != published.sha256:
                _verify(folder / WEIGHTS_FILE, published.sha256)
        except OSError as error:
            raise DurableCopyError(f"{published.uri}: {error}") from error
        self._verified_sha256 = published.sha256
        return folder

    def _download(self, filesystem: fsspec.AbstractFileSystem, path: str, sha256: str) -> Path:
        target = self._cache / sha256
        if target.exists():
            return target
        partial = self._cache / f"{sha256}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        filesystem.invalidate_cache(path)
        for file in filesystem.ls(path, detail=False):
            filesystem.get_file(file, str(partial / Path(file).name))
        # Before the rename: a broken download in the cache would be used again and again.
        _verify(partial / WEIGHTS_FILE, sha256)
        self._verified_sha256 = sha256
        partial.rename(target)
        complete = [each for each in self._cache.iterdir() if _SHA256.fullmatch(each.name)]
        for folder in sorted(complete, key=lambda folder: folder.stat().st_mtime)[:-_COPIES_KEPT]:
            shutil.rmtree(folder, ignore_errors=True)
        return target


class Copies(NamedTuple):
    """The durable copies of both; each keeps its own newest two."""

    policies: DurableCopies
    heads: DurableCopies


def copies_in(cache: Path) -> Copies:
    """Copies that are downloaded into a folder, those of heads into one below it."""
    return Copies(DurableCopies(cache), DurableCopies(cache / "heads"))


async def file_sha256(path: Path) -> str | None:
    """Checksum of a file; None if there is no such file."""
    try:
        return await asyncio.to_thread(_sha256, path)
    except FileNotFoundError:
        return None


def _tensors(uri: str) -> tuple[TensorSpec, ...]:
    try:
        with fsspec.open(f"{uri.rstrip('/')}/{WEIGHTS_FILE}", "rb") as file:
            start = file.read(_HEADER_START_BYTES)
            return tensor_specs(start + file.read(header_bytes(start) - len(start)))
    except (OSError, ValueError) as error:
        raise DurableCopyError(f"{uri}: {error}") from error


def _verify(path: Path, expected_sha256: str) -> None:
    found = _sha256(path)
    if found != expected_sha256:
        raise DurableCopyError(f"{path} has sha256 {found}, published was {expected_sha256}")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
