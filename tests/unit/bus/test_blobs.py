"""The blob store and the values that go through it."""

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from forgemq_bus.blobs import BlobStore
from forgemq_bus.errors import BlobError, RecordTooLargeError
from forgemq_bus.log import Emit, Record
from forgemq_bus.payloads import fetched, offloaded


def stored_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


async def test_a_blob_lies_under_its_sha256_and_comes_back(tmp_path: Path) -> None:
    store, data = BlobStore(str(tmp_path)), b"weights" * 1000
    sha256 = hashlib.sha256(data).hexdigest()
    reference = await store.put(data)
    assert (reference.sha256, reference.size_bytes) == (sha256, 7000)
    assert reference.uri == f"{tmp_path}/{sha256[:2]}/{sha256}"
    assert stored_files(tmp_path) == [f"{sha256[:2]}/{sha256}"]
    assert await store.get(reference) == data


async def test_the_same_bytes_are_stored_once_however_many_write_them(tmp_path: Path) -> None:
    store = BlobStore(f"file://{tmp_path}")
    references = await asyncio.gather(*(store.put(b"same") for _ in range(20)))
    assert len(set(references)) == 1
    assert len(stored_files(tmp_path)) == 1


async def test_a_damaged_blob_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path))
    reference = await store.put(b"right")
    (tmp_path / reference.sha256[:2] / reference.sha256).write_bytes(b"wrong")
    with pytest.raises(BlobError, match=reference.sha256):
        await store.get(reference)


async def test_a_blob_of_the_wrong_length_is_written_again(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path))
    reference = await store.put(b"whole")
    (tmp_path / reference.sha256[:2] / reference.sha256).write_bytes(b"wh")
    await store.put(b"whole")
    assert await store.get(reference) == b"whole"


async def test_a_missing_blob_is_an_error(tmp_path: Path) -> None:
    reference = await BlobStore(str(tmp_path / "here")).put(b"x")
    with pytest.raises(BlobError, match="cannot read"):
        await BlobStore(str(tmp_path / "elsewhere")).get(reference)


async def test_a_store_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BlobError, match="cannot write"):
        await BlobStore(str(tmp_path / "file")).put(b"x")


async def test_a_moved_store_is_still_readable(tmp_path: Path) -> None:
    reference = await BlobStore(str(tmp_path / "old")).put(b"kept")
    (tmp_path / "old").rename(tmp_path / "new")
    assert await BlobStore(str(tmp_path / "new")).get(reference) == b"kept"


async def test_other_file_systems_of_fsspec_work() -> None:
    store = BlobStore("memory://blobs-of-this-test")
    reference = await store.put(b"remote")
    assert reference.uri.startswith("memory://blobs-of-this-test/")
    assert await store.get(reference) == b"remote"


def emit(value: bytes) -> Emit:
    return Emit(topic="t", partition=3, key=b"k", value=value, headers=(("h", b"1"),))


def as_record(sent: Emit) -> Record:
    return Record(
        topic=sent.topic,
        partition=sent.partition,
        offset=5,
        timestamp_ms=0,
        key=sent.key,
        value=sent.value,
        headers=sent.headers,
    )


async def test_only_values_above_the_limit_are_offloaded_and_all_come_back(
    tmp_path: Path,
) -> None:
    store = BlobStore(str(tmp_path))
    emits = [emit(b"a" * size) for size in (0, 99, 100, 101, 5000)]
    ready = await offloaded(emits, blobs=store, inline_bytes_max=100)
    assert [len(item.value) for item in ready] == [0, 99, 100, 0, 0]
    assert [dict(item.headers).keys() for item in ready] == [
        {"h"},
        {"h"},
        {"h"},
        {"h", "blob", "blob-codec"},
        {"h", "blob", "blob-codec"},
    ]
    back = await fetched([as_record(item) for item in ready], blobs=store)
    assert back == [as_record(item) for item in emits]


async def test_without_a_store_a_large_value_is_refused_by_name() -> None:
    with pytest.raises(RecordTooLargeError, match=r"t/3: a value of 101 bytes .* limit of 100"):
        await offloaded([emit(b"a" * 101)], blobs=None, inline_bytes_max=100)


async def test_a_lost_blob_names_the_record(tmp_path: Path) -> None:
    store = BlobStore(str(tmp_path / "here"))
    (ready,) = await offloaded([emit(b"a" * 200)], blobs=store, inline_bytes_max=100)
    elsewhere = BlobStore(str(tmp_path / "elsewhere"))
    with pytest.raises(BlobError, match="t/3@5"):
        await fetched([as_record(ready)], blobs=elsewhere)
    with pytest.raises(BlobError, match="no blob store"):
        await fetched([replace(as_record(ready), offset=6)], blobs=None)
