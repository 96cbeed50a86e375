"""The blob store and the values that go through it."""

import asyncio
import hashlib
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from forgemq_bus.blobs import BlobFile, BlobStore, blob_name, minute_of
from forgemq_bus.errors import BlobError, LostBlobError, RecordTooLargeError
from forgemq_bus.log import Emit, Record
from forgemq_bus.payloads import fetched, offloaded
from forgemq_contracts.fields import BlobReference


def stored_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


NOON_S = 1_795_003_200.0  # 18 November 2026, 12:00 UTC.


def store_at(uri: object, *, run: str = "r", clock_s: Callable[[], float] = lambda: NOON_S):
    return BlobStore(str(uri), run=run, clock_s=clock_s)


def overwrite(reference: BlobReference, data: bytes) -> None:
    Path(reference.uri).write_bytes(data)


def names(files: list[BlobFile]) -> list[str]:
    return [file.name for file in files]


async def test_a_blob_lies_under_run_minute_and_sha256_and_comes_back(tmp_path: Path) -> None:
    store, data = store_at(tmp_path), b"weights" * 1000
    sha256 = hashlib.sha256(data).hexdigest()
    reference = await store.put(data)
    assert (reference.sha256, reference.size_bytes) == (sha256, 7000)
    assert reference.uri == f"{tmp_path}/values/r/20261118-1200/{sha256}"
    assert stored_files(tmp_path) == [f"values/r/20261118-1200/{sha256}"]
    assert blob_name(reference) == f"20261118-1200/{sha256}"
    assert await store.get(reference) == data


async def test_without_a_clock_it_is_the_machines_minute(tmp_path: Path) -> None:
    before = minute_of(time.time())
    reference = await BlobStore(str(tmp_path), run="r").put(b"x")
    assert before <= blob_name(reference).partition("/")[0] <= minute_of(time.time())


async def test_the_same_bytes_of_one_minute_are_stored_once_however_many_write_them(
    tmp_path: Path,
) -> None:
    store = store_at(f"file://{tmp_path}")
    references = await asyncio.gather(*(store.put(b"same") for _ in range(20)))
    assert len(set(references)) == 1
    assert len(stored_files(tmp_path)) == 1


async def test_the_same_bytes_of_another_minute_are_another_blob(tmp_path: Path) -> None:
    """So a writer never relies on a blob that is about to be deleted."""
    now = iter((NOON_S, NOON_S + 60))
    store = store_at(tmp_path, clock_s=lambda: next(now))
    first, second = await store.put(b"same"), await store.put(b"same")
    assert await store.list_minutes() == ["20261118-1200", "20261118-1201"]
    await store.delete("20261118-1200", [first.sha256])
    assert await store.get(second) == b"same"
    with pytest.raises(LostBlobError):
        await store.get(first)


async def test_a_damaged_blob_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    reference = await store.put(b"right")
    overwrite(reference, b"wrong")
    with pytest.raises(BlobError, match=reference.sha256):
        await store.get(reference)


async def test_a_blob_of_the_wrong_length_is_written_again(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    reference = await store.put(b"whole")
    overwrite(reference, b"wh")
    await store.put(b"whole")
    assert await store.get(reference) == b"whole"


async def test_a_missing_blob_is_lost(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    gone, _ = await store.put(b"x"), await store.put(b"y")
    os.unlink(gone.uri)
    with pytest.raises(LostBlobError, match="cannot read"):
        await store.get(gone)


async def test_in_a_store_that_is_not_there_no_blob_counts_as_lost(tmp_path: Path) -> None:
    reference = await store_at(tmp_path / "here").put(b"x")
    with pytest.raises(BlobError, match="mounted") as raised:
        await store_at(tmp_path / "elsewhere").get(reference)
    assert not isinstance(raised.value, LostBlobError)


async def test_no_write_makes_the_folder_of_a_run_again(tmp_path: Path) -> None:
    """As below the mount point of a folder that is not mounted: later reads would find a store."""
    announcer = store_at(tmp_path / "here")
    assert await announcer.make_folder(makes_address=True)
    writer = BlobStore(str(tmp_path / "here"), run="r", has_folder=True)
    reference = await writer.put(b"x")
    (tmp_path / "here").rename(tmp_path / "away")
    (tmp_path / "here").mkdir()
    restarted = BlobStore(str(tmp_path / "here"), run="r", has_folder=True)
    for store in (writer, restarted):
        with pytest.raises(BlobError, match="mounted"):
            await store.put(b"y")
        with pytest.raises(BlobError, match="mounted"):
            await store.check_folder()
    assert stored_files(tmp_path / "here") == []
    (tmp_path / "here").rmdir()
    (tmp_path / "away").rename(tmp_path / "here")
    await restarted.check_folder()
    assert await restarted.get(await restarted.put(b"y")) == b"y"
    assert await restarted.get(reference) == b"x"


@pytest.mark.parametrize("last", ["read", "written"])
async def test_a_store_in_which_there_was_a_blob_is_not_made_again(
    tmp_path: Path, last: str
) -> None:
    """Also if nobody has made the folder of the run: its first writer did."""
    store = store_at(tmp_path / "here")
    await store.check_folder()
    reference = await store.put(b"x")
    if last == "read":
        store = store_at(tmp_path / "here")
        await store.get(reference)
    (tmp_path / "here").rename(tmp_path / "away")
    with pytest.raises(BlobError, match="mounted"):
        await store.put(b"y")
    assert not (tmp_path / "here").exists()


async def test_the_folder_of_a_run_has_the_rights_of_the_address(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o2775)
    assert await store_at(tmp_path / "shared").make_folder(makes_address=False)
    for folder in ("shared/values", "shared/values/r"):
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o2775


async def test_where_the_address_is_not_reached_no_folder_is_made(tmp_path: Path) -> None:
    assert not await store_at(tmp_path / "elsewhere").make_folder(makes_address=False)
    assert not (tmp_path / "elsewhere").exists()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BlobError, match="cannot make"):
        await store_at(tmp_path / "file").make_folder(makes_address=True)
    in_memory = store_at("memory://objects")
    assert not await in_memory.make_folder(makes_address=True)
    await in_memory.check_folder()


@pytest.mark.parametrize("uri", ["x", "../../20261118-1200/secret", "values/r/today/{sha256}"])
async def test_an_address_that_names_no_blob_is_not_followed(tmp_path: Path, uri: str) -> None:
    store = store_at(tmp_path)
    reference = await store.put(b"x")
    wrong = msgspec.structs.replace(reference, uri=uri.format(sha256=reference.sha256))
    with pytest.raises(LostBlobError, match="names no blob"):
        await store.get(wrong)


async def test_a_store_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BlobError, match="cannot write"):
        await store_at(tmp_path / "file").put(b"x")


async def test_a_moved_store_is_still_readable(tmp_path: Path) -> None:
    reference = await store_at(tmp_path / "old").put(b"kept")
    (tmp_path / "old").rename(tmp_path / "new")
    assert await store_at(tmp_path / "new").get(reference) == b"kept"


@pytest.fixture(params=["folder", "memory"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder, and a file system of fsspec that works as an object store does."""
    return str(tmp_path) if request.param == "folder" else f"memory://{tmp_path}"


async def test_runs_share_an_address_and_see_and_delete_only_their_own(uri: str) -> None:
    ours, theirs = store_at(uri, run="r"), store_at(uri, run="r-2")
    first, second = await ours.put(b"same"), await theirs.put(b"same")
    assert (await ours.list_minutes(), await theirs.list_minutes()) == (["20261118-1200"],) * 2
    await ours.delete("20261118-1200", [first.sha256])
    assert await ours.list_blobs("20261118-1200") == []
    assert await theirs.get(second) == b"same"


async def test_what_is_listed_is_what_is_there_and_what_is_deleted_is_gone(uri: str) -> None:
    store = store_at(uri)
    assert await store.list_minutes() == []
    kept, deleted = await store.put(b"kept"), await store.put(b"gone")
    (minute,) = await store.list_minutes()
    assert set(await store.list_blobs(minute)) == {
        BlobFile(kept.sha256, 4),
        BlobFile(deleted.sha256, 4),
    }
    await store.delete(minute, [deleted.sha256])
    await store.delete(minute, [deleted.sha256])  # By another process.
    assert names(await store.list_blobs(minute)) == [kept.sha256]
    assert await store.get(kept) == b"kept"
    await store.delete(minute, [kept.sha256])
    assert await store.list_minutes() == []


async def test_what_else_lies_at_the_address_is_no_minute(tmp_path: Path) -> None:
    """Published weights lie beside the values."""
    store = store_at(tmp_path)
    (tmp_path / "weights" / "r").mkdir(parents=True)
    (tmp_path / "values" / "r" / "notes").mkdir(parents=True)
    assert await store.list_minutes() == []


def test_names_of_minutes_sort_by_time_and_say_when() -> None:
    starts = [0, 59, 60, 3600, 86_400 * 365, NOON_S]
    assert sorted(map(minute_of, starts)) == [minute_of(each) for each in starts]
    assert minute_of(59.9) == minute_of(0) != minute_of(60)


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
    store = store_at(tmp_path)
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


async def test_a_store_that_does_not_answer_is_an_error_that_names_the_record(
    tmp_path: Path,
) -> None:
    store = store_at(tmp_path / "here")
    (ready,) = await offloaded([emit(b"a" * 200)], blobs=store, inline_bytes_max=100)
    elsewhere = store_at(tmp_path / "elsewhere")
    with pytest.raises(BlobError, match="t/3@5"):
        await fetched([as_record(ready)], blobs=elsewhere)
    with pytest.raises(BlobError, match="no blob store"):
        await fetched([replace(as_record(ready), offset=6)], blobs=None)


ASK_STORE = """
import asyncio
from forgemq_bus.blobs import BlobStore
from forgemq_bus.errors import BlobError
from forgemq_contracts.fields import BlobReference
store = BlobStore("s3://bucket/blobs", run="r")
sha256 = "0" * 64
uri = f"s3://b/values/r/20260101-0000/{sha256}"
reference = BlobReference(uri=uri, sha256=sha256, size_bytes=1)
for work in (store.get(reference), store.list_minutes(), store.delete_all(), store.put(b"1")):
    try:
        asyncio.run(work)
    except BlobError as error:
        print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signed", "reason"),
    [
        ({"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}, "Could not connect"),
        ({}, "Unable to locate credentials"),
    ],
)
def test_an_object_store_that_does_not_answer_or_lets_nobody_sign_in_is_a_blob_error(
    tmp_path: Path, signed: dict[str, str], reason: str
) -> None:
    """Each of the four calls is translated; a process, because its client reads the environment."""
    environ = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "HOME": str(tmp_path),
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_MAX_ATTEMPTS": "1",
        **signed,
    }
    command = [sys.executable, "-c", ASK_STORE]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count(reason)) == (0, 4), done.stdout + done.stderr
