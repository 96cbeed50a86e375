"""Durable copies are checked; one in a folder is read in place, a remote one is downloaded."""

import asyncio
import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from forgemq_contracts.weights import PublishedWeights
from forgemq_inference.durable import DurableCopies, DurableCopyError, file_sha256


@pytest.fixture
def remote(trained: Path) -> Iterator[str]:
    """The trained folder in fsspec's object store in memory."""
    store = fsspec.filesystem("memory")
    for name in ("config.json", "model.safetensors"):
        store.pipe_file(f"/weights/{name}", (trained / name).read_bytes())
    yield "memory://weights"
    store.rm("/weights", recursive=True)


def published(uri: str, folder: Path, *, version: int = 1) -> PublishedWeights:
    data = (folder / "model.safetensors").read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    return PublishedWeights(
        lineage=1, version=version, sha256=sha256, uri=uri, size_bytes=len(data)
    )


async def test_a_local_copy_is_used_in_place(trained: Path, tmp_path: Path) -> None:
    copies = DurableCopies(tmp_path / "cache")
    assert await copies.folder(published(str(trained), trained)) == trained
    assert not (tmp_path / "cache").exists()


async def test_a_remote_copy_is_downloaded_whole(
    remote: str, trained: Path, tmp_path: Path
) -> None:
    folder = await DurableCopies(tmp_path / "cache").folder(published(remote, trained))
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (trained / name).read_bytes()


async def test_the_header_of_a_copy_names_its_tensors_wherever_it_lies(
    remote: str, trained: Path, tmp_path: Path
) -> None:
    copies = DurableCopies(tmp_path)
    local = await copies.tensors(published(str(trained), trained))
    assert local == await copies.tensors(published(remote, trained))
    assert [(t.name, t.dtype, t.shape) for t in local] == [
        (f"layers.{i}.weight", "float32", (8, 4)) for i in range(4)
    ]


async def test_other_bytes_than_the_published_ones_are_refused(
    trained: Path, base: Path, tmp_path: Path
) -> None:
    with pytest.raises(DurableCopyError, match="published was"):
        await DurableCopies(tmp_path).folder(published(str(base), trained))


async def test_a_broken_download_is_refused_and_downloaded_again(
    remote: str, trained: Path, tmp_path: Path
) -> None:
    store, wanted = fsspec.filesystem("memory"), published(remote, trained)
    whole = store.cat_file("/weights/model.safetensors")
    store.pipe_file("/weights/model.safetensors", whole[:-1])
    copies = DurableCopies(tmp_path / "cache")
    with pytest.raises(DurableCopyError, match="published was"):
        await copies.folder(wanted)
    store.pipe_file("/weights/model.safetensors", whole)
    assert ((await copies.folder(wanted)) / "model.safetensors").read_bytes() == whole


@pytest.mark.parametrize("left", [b"", None])
async def test_a_damaged_copy_in_the_cache_is_downloaded_again(
    remote: str, trained: Path, tmp_path: Path, left: bytes | None
) -> None:
    """As a machine that lost its power may leave it; another process of the lane finds it."""
    wanted = published(remote, trained)
    weights = await DurableCopies(tmp_path / "cache").folder(wanted) / "model.safetensors"
    whole = weights.read_bytes()
    if left is None:
        weights.unlink()
    else:
        weights.write_bytes(left)
    again = await DurableCopies(tmp_path / "cache").folder(wanted)
    assert (again / "model.safetensors").read_bytes() == whole


class _Slow(MemoryFileSystem):
    """The store in memory, from which files come once they may."""

    protocol = "slow"
    asked = SimpleQueue[str]()
    may_come = threading.Event()

    @classmethod
    def _strip_protocol(cls, path: str) -> Any:
        return super()._strip_protocol(path.replace("slow:", "memory:"))

    def get_file(self, rpath: str, lpath: str, **options: Any) -> None:
        self.asked.put(Path(rpath).name)
        self.may_come.wait(30.0)
        super().get_file(rpath, lpath, **options)


@pytest.mark.wall_clock
async def test_a_download_whose_caller_left_is_not_begun_again_beside_itself(
    remote: str, trained: Path, tmp_path: Path
) -> None:
    """As of an engine that is lost, and back while the files of its load still come."""
    fsspec.register_implementation("slow", _Slow, clobber=True)
    copies = DurableCopies(tmp_path / "cache")
    wanted = published(remote.replace("memory:", "slow:"), trained)
    first = asyncio.create_task(copies.folder(wanted))
    assert await asyncio.to_thread(_Slow.asked.get, timeout=30.0) == "config.json"
    first.cancel()
    second = asyncio.create_task(copies.folder(wanted))
    await asyncio.wait([second], timeout=0.5)
    _Slow.may_come.set()
    folder = await second
    assert [_Slow.asked.get() for _ in range(_Slow.asked.qsize())] == ["model.safetensors"]
    whole = (trained / "model.safetensors").read_bytes()
    assert (folder / "model.safetensors").read_bytes() == whole


@pytest.mark.parametrize("uri", ["/nonexistent", "memory://nonexistent"])
async def test_a_copy_that_is_gone_says_so(uri: str, trained: Path, tmp_path: Path) -> None:
    copies = DurableCopies(tmp_path)
    with pytest.raises(DurableCopyError, match="nonexistent"):
        await copies.folder(published(uri, trained))
    with pytest.raises(DurableCopyError, match="nonexistent"):
        await copies.tensors(published(uri, trained))


async def test_the_cache_keeps_the_two_newest_downloads(
    remote: str, trained: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    for name in ("a" * 64, "b" * 64, "c" * 64):
        (cache / name).mkdir(parents=True)
    folder = await DurableCopies(cache).folder(published(remote, trained))
    assert folder in set(cache.iterdir())
    assert len(list(cache.iterdir())) == 2


async def test_a_file_that_is_not_there_has_no_checksum(tmp_path: Path) -> None:
    assert await file_sha256(tmp_path / "none") is None
