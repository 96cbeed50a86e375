"""Durable copies are checked; one in a folder is read in place, a remote one is downloaded."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

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
