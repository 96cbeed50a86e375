"""Lanes of one machine that share a cache: what one downloads or deletes is never another's."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from forgemq_contracts.weights import PublishedWeights
from forgemq_inference.durable import copies_in
from tests.unit.inference.test_durable import published


@pytest.fixture
def versions(trained: Path, tmp_path: Path) -> Iterator[list[PublishedWeights]]:
    """Four versions in fsspec's object store in memory."""
    store, made = fsspec.filesystem("memory"), []
    for number in range(4):
        folder = tmp_path / str(number)
        folder.mkdir()
        weights = (trained / "model.safetensors").read_bytes() + bytes(number)
        (folder / "model.safetensors").write_bytes(weights)
        store.pipe_file(f"/versions/{number}/model.safetensors", weights)
        made.append(published(f"memory://versions/{number}", folder, version=number))
    yield made
    store.rm("/versions", recursive=True)


async def test_a_lane_that_is_ahead_deletes_nothing_that_another_lane_loads(
    versions: list[PublishedWeights], tmp_path: Path
) -> None:
    ahead, behind = (copies_in(tmp_path / "cache", lane=lane).policies for lane in range(2))
    loading = await behind.folder(versions[0])
    for version in versions:
        newest = await ahead.folder(version)
    assert (loading / "model.safetensors").exists()
    assert (newest / "model.safetensors").exists()


async def test_two_lanes_download_one_version_at_the_same_time(
    versions: list[PublishedWeights], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are in the middle of it at once: neither clears away what the other has so far."""
    store, both = fsspec.filesystem("memory"), threading.Barrier(2, timeout=20)
    # This store gives all readers of a file one object, with one position: they read in turns.
    download, one_reads = type(store).get_file, threading.Lock()

    def slow(self: object, source: str, target: str, **keywords: object) -> None:
        both.wait()
        with one_reads:
            download(self, source, target, **keywords)
        both.wait()

    monkeypatch.setattr(type(store), "get_file", slow)
    lanes = [copies_in(tmp_path / "cache", lane=lane).policies for lane in range(2)]
    folders = await asyncio.gather(*(lane.folder(versions[1]) for lane in lanes))
    whole = store.cat_file("/versions/1/model.safetensors")
    assert [(each / "model.safetensors").read_bytes() for each in folders] == [whole, whole]


async def test_what_a_killed_download_left_is_removed_by_the_next_one(
    versions: list[PublishedWeights], tmp_path: Path
) -> None:
    copies = copies_in(tmp_path / "cache", lane=0).policies
    folder = await copies.folder(versions[0])
    left = folder.with_name(f"{'a' * 64}.partial")
    left.mkdir()
    await copies.folder(versions[1])
    assert not left.exists()
    assert folder.exists()
